"""From a request for a capture to a stored diagnosis.

- service: the one path of all captures; session: the states of one capture; participant: a place
  that takes part in it; live_jobs: the job that a request names
- board: the interface to the process that captures run in
- policy: the limits on captures; disk: free space; cost: step time before, during and after
- register: the captures that are known; store: their files and retention
- finisher: the work that waits for a disk or a child process; fair_queue: takes owners in turn;
  usable: the files that a diagnosis can read
- children: child processes that read untrusted files
- triggers: anomalies that request captures; alerts: Alertmanager's alerts that do
- remote: finished captures in an object store
- config: the sections ``triggers``, ``store`` and ``remote_store``
"""
