"""The life of an anomaly: opened once, updated, closed when it is over, continued if it returns.

- register: turns results into anomalies; tracked: one anomaly with its worst moment
- explanation: which active anomaly is the cause of what is found
- core_contention: evidence of why a slow rank had no core
- snapshot: what is saved over a restart
"""
