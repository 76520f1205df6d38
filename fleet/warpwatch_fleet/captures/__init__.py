"""Multi-node captures: the same steps on all ranks, under one id.

- remote_agents: the agents as participants, and the ranks of a large job that are captured
- requests: all captures of a fleet, as users, anomalies and schedules request them, with the store,
  metrics and board that the capture service needs
"""
