"""Which anomalies are answered with a capture, of whom, and when.

- decisions: what becomes of each anomaly's trigger, and why
- recipes: from an anomaly to the request for its capture: which ranks, which options
- baseline: the one capture of a healthy job that later ones are compared with
"""
