"""Measures one trace, for the rules and the reports.

- measures: all numbers of a trace, also as JSON; reduction: as the file of a rank
- gpu_work: kernels and copies; gpu_time: the device's time and its collectives; idle: why it is
  idle; replay: what faults cost; roofline: its peaks
- cpu_time, host_events, runtime_calls: the host's time and its calls
- operators: their time and FLOPs; code_lines: lines of the user's code
- steps: each step, and the longest one to be drawn; iterations: those of inference servers
"""
