"""Measures one trace, for the rules and the reports.

- intervals: unions of time, the base of every share
- measures: all numbers of a trace; measures_json: as they are written
- gpu_time: kernels, copies, collectives; idle: why the device is idle; replay: what faults cost
- cpu_time, host_events, runtime_calls: the host's time and its calls
- operators, flops; roofline; code_lines: lines of the user's code
- steps: each step, and the longest one to be drawn; reduction: a rank's measures as a file
"""
