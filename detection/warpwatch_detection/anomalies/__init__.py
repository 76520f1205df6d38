"""The life of an anomaly: opened once, updated, closed when it is over, continued if it returns.

- register: verdicts into anomalies; register_state: what it keeps of them; changes: what it returns
- causes, explanation: which active anomaly is the cause of what is found
- core_contention: evidence of why a slow rank had no core
- suppressed: what is found and not raised, because another anomaly explains it
- rank_devices: which rank runs on which device
- resumption: what is news after a restart; snapshot: what is remembered over one
"""
