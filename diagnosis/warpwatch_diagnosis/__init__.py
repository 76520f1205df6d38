"""Traces in, diagnosis out: a pure function of files, with msgspec beside the standard library.

- json_stream, raw_events, kinds, events, reader: a Kineto/Chrome trace file becomes a Trace of
  compact events; inventory: what is in a file, without keeping it
- intervals: unions of time
- measures and what it asks: gpu_time (idle, gap_splitter, launches, kernels, copies, collectives,
  clocks), cpu_time, host_events (host_patterns), operators (operator_sweep, signature, flops),
  synchronization, roofline, memory_timeline, steps, step_timeline, lines and places: the numbers
  of one trace
- alignment, completeness: the ranks of a capture beside each other; before_after: a baseline
- rules: one file a bottleneck
- diagnosis: all of it together; text, html with report, and trace_out (excerpt) show it
- stacks, stacks_file: where the ranks of a hanging job stand
"""
