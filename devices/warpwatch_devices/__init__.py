"""Reads everything from hardware and host.

- source: the interfaces of sources and sinks
- nvml: NVIDIA GPUs; dcgm: what NVML lacks; simulated: devices without hardware
- xids: XIDs from kernel and driver
- host: the machine, and its ports of InfiniBand, RoCE and EFA
- processes, memory_groups: the processes that use a GPU
- processor_waits: waits for a core, and the users of that core
- attribution: pods and Slurm jobs by device
- config: the sections `sources` and `attribution` of the configuration
"""
