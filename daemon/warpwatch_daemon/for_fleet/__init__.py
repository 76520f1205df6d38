"""The agent's side of a fleet.

- record_stream: the newest records in memory; records: sends them to followers
- leases: lets a fleet judge a job
- agent: the interface of agents for HTTP; agent_api, documents, routes: its operations
"""
