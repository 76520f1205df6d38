"""One process for all nodes of a cluster: a job over many nodes is one job.

- config: the section `fleet`
- targets: which agents there are, by list, files and DNS
- agent_link: the connection to one agent: its stream, leases, requests and files
- following: follows the agents of all targets
- node: what an agent has said, validated
- joining: which runs of several nodes are one
- merging: records of several nodes in one order of time
- jobs: the ranks of a job, and who judges it
- captures: captures over nodes
- kubernetes: what it does in its cluster
- fleet: all of it together, as the HTTP server asks for it
"""
