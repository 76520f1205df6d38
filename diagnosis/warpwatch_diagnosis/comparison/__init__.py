"""Traces beside each other.

- alignment: the ranks of a capture on one clock, which waited for which, slow links
- cpu_ranks: whose steps on the CPU are longer without waiting, and which rank comes last
- before_after: what changed since the baseline, or on a slow rank
"""
