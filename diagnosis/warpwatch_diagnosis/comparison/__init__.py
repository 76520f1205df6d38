"""Traces beside each other.

- alignment: the ranks of a capture on one clock, and who waited for whom
- completeness: whether they are ranks of one capture, and which are missing
- rank_steps: whose steps on the CPU are longer without waiting, and why
- before_after: what changed since the baseline, or on a slow rank
"""
