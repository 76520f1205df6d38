"""Records in, anomalies out: pure, without a clock and without input or output.

- engine: feeds records to the detectors and keeps the register of anomalies
- detector: what a detector is; detector_runner: all of them at once
- detectors: one file a kind of anomaly, and their registry; signals: what they work out of series
- job_steps: joins the ranks' steps; capture_windows: which of them a capture touched
- anomalies: the register, what is suppressed under another cause, what survives a restart
- replay: a log of records through the same engine, in event time
- config: the sections `detection` and `anomalies` of the configuration
"""
