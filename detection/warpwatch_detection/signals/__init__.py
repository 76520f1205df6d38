"""Computes levels, noise and changes of noisy series, for the detectors.

- baselines: medians of few values and of sliding windows; the healthy level of a value
- samples: step and iteration times, corrected for their work
- level_shift: shifts of the level of such a signal
- peers, rank_levels: each rank's time against its peers' time, and against its own past
- memory_growth: memory that grows without end
"""
