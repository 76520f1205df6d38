"""The parts of the source ``nvml``.

- library: loads NVML, gives return codes their meaning, counts the cost of calls
- session: the devices between one initialisation and the next, and the search for new ones
- device: one GPU; mig: its MIG devices; processes: the processes on them
- tiers: when each reader is called; readers, fields, facts: the tables of values
- sample_buffers: the driver's own samples, several per second in one call
- gpm: the hardware counters of Hopper and newer; events: XIDs and health
- survey: reads every GPU once in a child process, for the doctor
"""
