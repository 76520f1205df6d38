"""Defines the data that all packages share, without behaviour.

- metric, catalogue, metrics.csv: every metric, one row each, its labels and DCGM's names
- samples: one reading of a device or of the host, and the workloads on devices
- jobs: the identity of a job: owner, name and run
- records: events in order of time; log: their JSON form, the telemetry log; stream: to a fleet
- anomalies: their kinds, and one finding with its sentence
- captures: one profiling request and its result; alerts: the outcomes of an alert
- xids: their meaning
- sections: the base of the configuration; errors: end a command with one line
- state: the current state of an agent, which exporters turn into other formats
- newest: mappings of bounded size
"""
