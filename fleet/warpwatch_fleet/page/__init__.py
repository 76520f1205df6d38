"""The fleet's own page: the parts of the agent's, with jobs and nodes as heat maps.

- heatmap: ranks by node, coloured by what a step takes them and how long they wait
- nodes: agents with their GPUs, those in trouble first
"""
