"""Captures, from the request to a stored diagnosis.

- service: the one path of all captures; session: the states of one capture
- participant: a place that takes part in it, the job that a request names, and the process around
- policy: the limits on captures and their expected cost; cost: step time before, during and after
- register: the captures in memory; store: their files, and retention
- finisher: the work that waits for a disk or a child process
- child: the diagnosis, verification: what a trace lacks, both in child processes that read
  untrusted files; confinement: the limits and the sandbox of both
- triggers: captures for anomalies; regular: captures of healthy jobs; alerts: captures for alerts
  of Alertmanager
- remote_store: finished captures in an object store
- config: the sections ``triggers``, ``store`` and ``remote_store``
"""
