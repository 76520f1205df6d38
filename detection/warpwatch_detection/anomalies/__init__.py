"""The life of an anomaly: opened once, updated, closed when it is over, remembered.

- register: verdicts into anomalies; episodes: what it keeps of them
- shadows: what is found and not raised, because another anomaly explains it
- resumption: what is news after a restart; rank_devices: which rank runs on which device
- explanation: which active anomaly is the cause of what is found
- snapshot: what the engine and its detectors remember, over a restart of the daemon
- context, tracks: the metrics of the minutes around an anomaly
- store: the history, in SQLite; archive: what the pipeline tells of anomalies to all of these
"""
