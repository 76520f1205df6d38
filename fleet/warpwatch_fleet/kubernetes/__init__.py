"""The fleet's work in the cluster that it runs in, as the configuration enables it.

- api: the API server, queried with the service account's token
- events: anomalies, on pods and nodes
- conditions: `GpuHealthy` of nodes, and taints of nodes whose hardware must be serviced
- captures: objects of kind Capture
- injection: the webhook that adds the shim to labelled pods
- tasks: all of them, for the loop that follows the agents
"""
