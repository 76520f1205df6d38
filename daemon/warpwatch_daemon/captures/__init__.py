"""From a request to a stored diagnosis.

- policy: may this be captured now, and if not why, and which refusals are counted; disk: how much
  room there is
- session: a capture at its ranks, as the coordinator sees it, and how far ranks are
- shim, shim_backend: captures by the shim in the process; stacks: from outside, where a process
  cannot report them
- coordinator: the one path for all captures
- capture_register: the captures that are known; capture_id: what they are called; store: files,
  capture.json, retention
- finisher: what of a capture waits for a disk or a child: folder, files, diagnosis, price;
  fair_queue: owners are served in turn
- verification: whether a trace holds what was asked for, read in a process of its own
- cost: the step time before, during and after
- child: the diagnosis in a process of its own, with its own limits; confinement, seccomp: what such
  a process may not do
- triggers: anomalies that ask for captures; alerts: Alertmanager's that do
"""
