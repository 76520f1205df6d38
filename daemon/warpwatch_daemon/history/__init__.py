"""Keeps data over a restart of the daemon.

- archive: stores anomalies, their context and the detectors' state, in a writing loop
- context: the metrics of the minutes around an anomaly
- runs: a summary of each run, also copied into the remote store
"""
