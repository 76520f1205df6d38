"""The agent's side of a fleet.

- record_stream: the newest records in memory, for followers; bus: publishes them
- leases: lets a fleet evaluate a job
- api: the operations that only agents have, and the interface that they need
"""
