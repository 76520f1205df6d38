"""What detectors work out of noisy series: levels, noise and how they change.

- medians: the median of a few values, and of a window that slides
- step_signal, step_work, work_scaling: a job's step times as samples, corrected for each step's
  work
- signal_history, level_shift, rise: has the level of such a signal shifted, and until when
- peers, rank_levels, frozen_baseline: each rank's time against its peers', and against its own past
- regular_pauses, reported_pauses: pauses of one rank, seen in its steps or reported by the shim
- memory_growth: memory that grows and never settles
"""
