"""Everything that is read from hardware and host.

- source: what a source and a sink are, and what a source may know of the agent
- nvml: NVIDIA GPUs; dcgm: what NVML cannot give; simulated: devices without hardware
- kernel_log, xid_ledger: XIDs as kernel and driver report them
- host, processes, process_tree, memory_groups: the machine, and who uses a GPU on it
- network: ports of InfiniBand, RoCE and EFA
- processor_waits: what keeps a process from a core; core_users: who used its cores
- attribution: whose work runs on which device (pods, Slurm jobs)
- config: the sections `sources` and `attribution` of the configuration
"""
