"""The numbers of one trace, from which the rules conclude and which the reports show.

- intervals: unions of time, of which every share is made
- measures: all numbers of a trace; measures_json: as they are written
- gpu_time: kernels, copies, collectives, launches, clocks; idle, idle_causes, gap_splitter: why it
  is idle
- cpu_time, host_events, host_patterns, synchronization: what the host did
- operators, operator_sweep, flops; roofline; memory_use; code_lines: lines of the user's code
- steps, step_timeline: each step, and the longest one to be drawn
"""
