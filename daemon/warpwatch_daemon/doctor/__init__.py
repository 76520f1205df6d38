"""Implements `warpwatch doctor`, which checks this node and advises.

`report` runs the groups of checks and prints their findings (`check`). The groups evaluate answers
of the GPUs, read by `warpwatch_devices.nvml.survey`, and the node's files.
"""
