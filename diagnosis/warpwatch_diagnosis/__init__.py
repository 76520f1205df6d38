"""Turns traces into a diagnosis: a pure function of files that needs only msgspec.

From the top floor down, each importing only what is below it:

- __main__: the command; diagnosis: from files to a diagnosis
- report: the diagnosis as text and as a page
- stacks: the late ranks of a hanging job; memory_growth: the lines that keep memory
- verdict: one finding per fault, the doubts, the verdict
- rules: the faults; advice: their advice
- comparison: ranks with each other, and a capture with its baseline
- measures: the numbers of one trace
- trace: reads a Kineto/Chrome trace file into compact events
"""
