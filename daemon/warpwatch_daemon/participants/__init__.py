"""The ranks of this node as participants of captures.

- local_ranks: commands to the shim in each training process, its answers and files
- outside: stacks of a process that cannot answer: stopped, or a C call holds its GIL
- gil_stacks: the pipe that the process holds ready, into which faulthandler writes
- py_spy: the stacks read by py-spy, where it is installed and permitted
"""
