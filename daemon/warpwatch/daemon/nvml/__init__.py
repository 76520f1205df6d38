"""NVML: what the source ``nvml`` is made of.

- library: finding it, and what each return code means; costs: calls and their time, by reader
- generation: the devices between one initialisation and the next; device: one GPU; mig: its
  instances; occupancy: who is on it
- tiers: when each reader is called; readers, fields, substitutes, facts: the tables of what is read
- batch, buffer, samples, processes: how the dearer answers are read in one call and decoded at once
- gpm, gpm_metrics: the counters of Hopper and newer; events, event_types: XIDs and health
- call_guard: calls that another thread can give up
"""
