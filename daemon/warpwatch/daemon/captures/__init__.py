"""From a request to a stored diagnosis.

- policy: may this be captured now, and if not why
- arming: naming the step at which all ranks begin
- coordinator: one capture after the other through its states
- cost: the step time before, during and after
- store: files, capture.json, retention
- child: the diagnosis in a process of its own, with its own limits
"""
