"""NVML: what the source ``nvml`` is made of.

- library: finding it, and what each return code means; costs: calls and their time, by reader
- generation: the devices between one initialisation and the next, with scanner (which GPUs there
  are), generation_sink (the dead publish nothing) and last_resort (where only a restart helps)
- device: one GPU; mig: its instances; occupancy: who is on it; pcie_bytes: a counter of two origins
- tiers: when each reader is called; readers, fields, substitutes, facts: the tables of what is read
- batch, buffer, sample_buffers, processes: dear answers in one call, decoded at once
- gpm, gpm_devices, gpm_metrics: the counters of Hopper and newer
- events, event_devices: XIDs and health
"""
