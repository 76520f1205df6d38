"""Implements `warpwatch doctor`, which checks this node and advises.

Groups of checks evaluate the answers of the GPUs, read by `warpwatch_devices.nvml.survey`, and the
node's files. `warpwatch_daemon.cli.doctor` lists the groups and prints their findings.
"""
