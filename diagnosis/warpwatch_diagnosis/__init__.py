"""Turns traces into a diagnosis: a pure function of files that needs only msgspec.

From the top floor down, each importing only what is below it:

- __main__: the command
- report: the diagnosis as text and as a page
- stacks: the late ranks of a hanging job; memory_growth: the lines that keep memory
- diagnosis: from files to a verdict; findings: one per fault, and the doubts without one
- rules: the faults and their advice
- alignment: the ranks of a capture on one clock; before_after: changes since a baseline
- measures: the numbers of one trace; intervals: unions of time; words: titles and numbers
- trace: reads a Kineto/Chrome trace file into compact events
"""
