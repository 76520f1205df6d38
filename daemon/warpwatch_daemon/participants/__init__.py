"""The ranks of this node as participants of captures.

- local_ranks: commands to the shim in each training process, its answers and files
- stacks: stacks read from outside, for a process that cannot answer
"""
