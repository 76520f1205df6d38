"""Implements `warpwatch demo`: a real training on simulated GPUs, with faults that are found.

- faults: the faults and their expected findings; training: the program of a rank
- processes: daemon, fleet and ranks as processes; story: one fault until its verdict
"""
