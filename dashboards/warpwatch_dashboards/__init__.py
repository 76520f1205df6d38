"""Grafana dashboards and alert rules as code; ``python -m warpwatch_dashboards`` writes the files.

- fleet, node, training_job, agent: a dashboard each; node_*, training_job_*, agent_*: their rows
- page: from rows to the JSON that Grafana imports; links: identifiers and links between dashboards
- panels, tables: kinds of panel; device_panels: those about one metric of devices, one row each
  in device_panels.csv
- queries, job_queries: PromQL; variables, marks: variables and annotations
- rules: Prometheus rules, written by hand; rule_files: reading them
- provisioning: the same rules for Grafana's alerting

Nothing is imported here: what generates the files needs grafana-foundation-sdk, the daemon not.
"""
