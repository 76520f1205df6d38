"""The Kineto back end: what stock PyTorch says to dynolog, it says to this daemon.

``protocol`` has the messages, ``pollers`` who polls and what was ordered of them, ``process_facts``
which rank that is, ``server`` the socket between the two, ``backend`` whom it can capture,
``session`` one capture, with the trace that a process writes.
"""
