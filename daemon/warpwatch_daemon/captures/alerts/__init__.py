"""From an alert that fires to a capture of the ranks that its labels name.

- webhook: Alertmanager's notification as it arrives
- targets: which ranks an alert is about, as far as this node has them
- recipes: from the alerts of one job and kind to one request for a capture
- alert_requests: what becomes of each alert, and why; asks for no capture twice
- peers: the other nodes' daemons, and passing an alert on to the one that has its ranks
"""
