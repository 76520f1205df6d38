"""Compares traces with each other.

- alignment: the ranks of a capture on one clock, which waited for which, slow links
- cpu_ranks: ranks on the CPU, by their steps and by their order at collectives
- before_after: the changes since the baseline, or on a slow rank
"""
