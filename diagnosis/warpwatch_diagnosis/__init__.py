"""Traces in, diagnosis out: a pure function of files, with msgspec beside the standard library.

From the top floor down, each importing only what is below it:

- __main__: the command; diagnosis: from files to a diagnosis
- report: the diagnosis as text, as a page, and as a smaller trace for a viewer
- stacks: where the ranks of a hanging job stand; memory_growth: what keeps memory
- verdict: one finding a fault, the doubts, the verdict
- rules: one file a bottleneck
- comparison: ranks beside each other, and a capture beside its baseline
- measures: the numbers of one trace
- trace: a Kineto/Chrome trace file becomes compact events
"""
