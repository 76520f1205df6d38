"""What the agent knows now.

- hub: what sources write to and everyone else reads from
- device_table: what several sources know of one device; job_energy: of ranks and jobs
"""
