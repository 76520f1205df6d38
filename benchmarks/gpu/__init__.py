"""Checks against a real GPU and its driver, which no fake driver can stand in for (docs/gpu.md).

- run.sh: the one command; wheels.sh: what it needs on a machine without network
- __main__: the checks one after the other; runner: one of them in a process with a deadline
- report: what a check writes; results: what the run writes
- doctor, readers, calls, counters, footprint, shim, capture: one file a check
- nvidia_smi, readers.csv: what nvidia-smi says, and which of it is which value of ours
- loads: known work for the GPU; networks, step_loops, training: programs with the shim
"""
