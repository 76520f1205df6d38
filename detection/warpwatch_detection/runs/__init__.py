"""Runs in figures.

- run_figures: the figures of one run, as its steps come
- comparison: two summaries side by side, and the earlier runs that a run is compared with
"""
