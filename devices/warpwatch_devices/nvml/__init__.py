"""The parts of the source ``nvml``.

- library: loads NVML, gives return codes their meaning, counts the cost of calls, describes devices
- source: the devices between one initialisation and the next; device: one GPU and its handle
- readers: the tables of values, and when each is read; fields: many values in one call
- counters: integrals and totals that NVML does not have; gpm: the hardware counters of Hopper on
- mig: MIG devices; processes: the processes on a GPU; events: XIDs and health
- survey: reads every GPU once in a child process, for the doctor
"""
