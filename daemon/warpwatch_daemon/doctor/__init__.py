"""`warpwatch doctor`: what this node offers, what is wrong with it, and what to do.

- registry: the groups of checks, in order; `examine` runs them
- check: one finding, and findings of several GPUs as one; what a group is given
- machine: the node's files in /proc, /sys and /dev, the environment, and which GPU sits where
- questions: what NVML is asked about a GPU; interview: the child process that asks
- survey, facts: its answers as they come, and as data
- daemon: what the running daemon reports; all other groups examine this machine
- agent, driver, devices, kernel_log, topology, host, nccl, schedulers: one group each, which
  judges and asks nothing; device_rules and nccl_variables are their rules
- text: findings for a person
"""
