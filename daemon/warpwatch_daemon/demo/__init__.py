"""Implements `warpwatch demo`: a real training on simulated GPUs, with faults that are found.

- processes: daemon, fleet and ranks as processes; training: the program of a rank
- story: the faults, and one of them until its verdict
"""
