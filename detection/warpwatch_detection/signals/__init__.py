"""Works out levels, noise and changes of noisy series, for the detectors.

- medians: the median of a few values, and of a window that slides
- step_signal: a job's step times as samples, corrected for each step's work
- level_shift: whether the level of such a signal has shifted, and until when
- peers, rank_levels, frozen_baseline: each rank's time against its peers', and against its own past
- pauses: pauses of one rank, seen in its steps or reported by the shim
- memory_growth: memory that grows and never settles
"""
