"""Records in, anomalies out: pure, without a clock and without input or output.

- engine: feeds the records of one node to the detectors and keeps the register of anomalies
- detectors: one file a kind of anomaly, and their registry
- anomalies: the register, what is suppressed under another cause, what survives a restart
- replay: a telemetry log through the same engine, in event time
- config: the section `detectors` of the configuration
"""
