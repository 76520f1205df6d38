"""Checks against a real GPU and its driver, which no fake driver can replace (docs/gpu.md).

- run.sh: the one command; wheels.sh: fetches what it needs on a machine without network
- __main__: runs the checks one after the other and writes their results
- runner: runs one check in a process with a deadline; report: what a check writes
- daemon (doctor, footprint), readers, calls, counters (with known loads), shim, capture: the checks
- nvidia_smi, readers.csv: reads nvidia-smi, and the path there of each of our values
- training: networks, trained with the shim
"""
