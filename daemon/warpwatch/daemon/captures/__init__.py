"""From a request to a stored diagnosis.

- policy: may this be captured now, and if not why
- session: one capture while it runs, and the step at which all its ranks begin
- coordinator: the one path for all captures
- cost: the step time before, during and after
- store: files, capture.json, retention
- child: the diagnosis in a process of its own, with its own limits; memory: what is left for it
"""
