"""What outlives a restart of the daemon.

- archive: hands anomalies, the minutes around them and what the detectors know to a writing loop
- store: anomalies, in SQLite
- runs: what is kept of each run
- context: the metrics of the minutes around an anomaly
"""
