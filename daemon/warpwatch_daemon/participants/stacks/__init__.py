"""Stacks of a process that cannot answer: stopped, or a C call holds its GIL.

- gil_stacks: the pipe that the process holds ready, into which faulthandler writes
- py_spy: the stacks read from outside, where py-spy is installed and may
- outside: which way is taken, and the file that comes of it
"""
