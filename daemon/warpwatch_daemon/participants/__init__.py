"""The ranks of this node as participants of captures.

- local_ranks: commands to the shim in each training process, its answers and files
- stacks: those of a process that cannot answer (stopped, or a C call holds its GIL), read by
  py-spy or from the pipe that it holds ready for faulthandler
"""
