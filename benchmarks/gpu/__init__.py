"""Checks against a real GPU and its driver: what no fake driver can tell. `docs/gpu.md` says more.

- run.sh: the one command; __main__: its arguments, and the checks one after the other
- check: what a check is; registry: all of them, with their time-outs; child: one in its own process
- runner, results: processes with a deadline, and what is written
- readers, calls, fields, gpm, footprint, shim, capture, doctor: one file a check
- nvidia_smi, comparison, metric_table: how values are compared with nvidia-smi
- nvml: raw calls; loads, training, step_loops: programs that keep the GPU busy; node: a daemon
"""
