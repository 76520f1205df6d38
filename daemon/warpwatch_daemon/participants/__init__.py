"""The recorders of captures on a node.

- shim, shim_backend: the shim in the training process
- stacks: stacks read from outside, for a process that cannot answer
"""
