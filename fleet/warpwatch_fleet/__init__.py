"""One process for all nodes of a cluster: a job over many nodes is one job.

- config: the section `fleet`
- targets: the agents, from a list, files and DNS
- agent_link: the connection to one agent: its stream, leases, requests and files
- following: follows the agents of all targets
- node: the validated state of one agent
- jobs: the ranks of a job, and the detectors that evaluate it
- memory: the state of jobs over a restart
- cluster: all nodes, and the jobs over them; runs: summaries of finished runs
- captures: multi-node captures
- kubernetes: Events, conditions, taints, Capture objects and the webhook
- page: the web page; series: the metrics
- fleet: all of it together, as the HTTP server asks for it
"""
