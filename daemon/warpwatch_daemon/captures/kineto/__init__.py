"""The Kineto back end: what stock PyTorch says to dynolog, it says to this daemon.

``protocol`` has the messages, ``processes`` who polls and what was ordered of them, ``server`` the
socket between the two, ``session`` one capture, ``trace_file`` what a process writes.
"""
