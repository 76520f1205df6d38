"""The numbers of one trace, on which the rules conclude and which the reports show.

- intervals: unions of time, of which every share is made
- measures: all numbers of a trace; measures_json: as they are written
- gpu_time: kernels, copies, collectives, launches, clocks; idle and gap_splitter: why it idles
- cpu_time, host_events, host_patterns, synchronization: what the host did
- operators: operator_sweep, signature, flops; roofline; memory_timeline
- steps, step_timeline: each step; places, lines: lines of the user's code
"""
