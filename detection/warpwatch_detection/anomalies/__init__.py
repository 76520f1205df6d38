"""The life of an anomaly: opened once, updated, closed when it is over, continued if it returns.

- register: turns results into anomalies; tracked: one anomaly with its worst moment
- explanation: finds the active anomaly that is the cause of a finding
- core_contention: evidence of why a slow rank had no core
- snapshot: saves states over a restart
"""
