"""The words that all parts share: data, no behaviour.

- metric, catalogue, *_metrics: every metric we export, one row each
- samples: one reading of a device or of the host
- records: what happens, in order of time; the telemetry log is its JSON form
- anomalies: the closed set of kinds, and one finding
- captures: one profiling request and what it brought
- state: everything known at one moment, which exporters turn into another format
"""
