"""From a firing alert to a capture of the ranks that its labels name.

- targets: the ranks of an alert that run here
- recipes: from the alerts of one job and kind to one request for a capture
- alert_requests: requests a capture once per alert, and returns the outcome of each alert
"""
