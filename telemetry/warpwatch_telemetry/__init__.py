"""The words that all parts share: data, no behaviour.

- metric, catalogue, *_metrics: every metric we export, one row each
- samples: one reading of a device or of the host
- jobs: which job something is of: owner, name and run
- records: what happens, in order of time; log: its JSON form, the telemetry log; series_text: a
  device's series in it
- anomalies: the closed set of kinds, and one finding
- captures: one profiling request and what it brought; alerts: what became of an alert
- attribution: whose work runs where; xid*: what XIDs mean; dcgm_names: DCGM's metrics
- sections: the base of the configuration; errors: what ends a command with one line
- state: everything known at one moment, which exporters turn into another format
- newest: a mapping of bounded size
"""
