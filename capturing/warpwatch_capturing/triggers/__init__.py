"""Automatic captures: for anomalies, and of healthy jobs.

- decisions: the triggers of anomalies: requested now, later, again or not at all, and why
- recipes: from an anomaly to the request for its capture: ranks and options
- regular: captures of healthy jobs: the baseline of each run, and what a fleet schedules
"""
