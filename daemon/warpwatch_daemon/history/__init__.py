"""Keeps data over a restart of the daemon.

- archive: hands anomalies, their context and the detectors' state to a writing loop
- store: anomalies, in SQLite; context: the metrics of the minutes around an anomaly
- runs: a summary of each run; run_uploads: copies them into the remote store
"""
