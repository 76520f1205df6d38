"""The current state of the agent.

- hub: sources write to it and everything else reads it; it merges the sources of a device
- job_figures: energy and model FLOPs utilization of jobs
"""
