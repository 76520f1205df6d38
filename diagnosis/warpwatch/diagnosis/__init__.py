"""Traces in, diagnosis out: a pure function of files, standard library only.

- json_stream, reader: a Kineto/Chrome trace file becomes a Trace of compact events
- intervals, gpu_time, cpu_time, measures: the numbers of one trace
- rules: one file a bottleneck
- diagnosis: all of it together; text and html show it
- stacks: where the ranks of a hanging job stand
"""
