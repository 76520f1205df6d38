"""The whole loop without a GPU: simulated devices, real training, real captures.

- faults: what can be switched on, and what the loop must answer
- training: the program of one rank
- nodes: several daemons in folders of their own, and a fleet over them
- processes: the daemon and the ranks, started and stopped
- story: one fault from the first step to the verdict
"""
