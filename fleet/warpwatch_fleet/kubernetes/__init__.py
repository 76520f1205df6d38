"""What the fleet does in the cluster that it runs in, as far as the configuration says so.

- api: the API server, asked with the service account's token
- events: anomalies, on pods and nodes
- conditions: `GpuHealthy` of nodes
- taints: of nodes whose hardware must be served
- captures: objects of kind Capture
- injection: the shim for a pod that is labelled; webhook: how the API server asks for it
- tasks: all of them, for the loop that follows the agents
"""
