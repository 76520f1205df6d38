"""Captures over nodes: the same steps on all ranks, under one id.

- choosing: which job is meant, and which ranks of a large one
- part: what one node does of a capture
- over_nodes: one capture, from the start step that all nodes are given to its outcome
- board: the fleet as a place of captures
- requests: all of them, as people and anomalies ask
"""
