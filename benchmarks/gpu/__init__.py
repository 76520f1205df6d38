"""Checks against a real GPU and its driver, which no fake driver can replace (docs/gpu.md).

- run.sh: the one command; wheels.sh: fetches what it needs on a machine without network
- __main__: runs the checks one after the other and writes their results
- runner: runs one check in a process with a deadline, and what a check writes
- the checks: values (readers: nvidia-smi by readers.csv; counters: known loads), daemon (calls,
  footprint), loop (shim, capture)
- training: networks, trained with the shim
"""
