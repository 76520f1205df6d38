"""Grafana dashboards and alert rules as code; ``python -m warpwatch_dashboards`` writes the files.

- fleet, node, training_job, inference_server, agent: a dashboard each
- page: from rows to the JSON that Grafana imports; links: identifiers and links between dashboards
- panels: kinds of panel and table; panel_table: panels that are lines of a CSV file
- queries: PromQL; variables: variables and annotations
- rules: Prometheus rules, written by hand; rule_files: reads them, and converts them for Grafana

Nothing is imported here: what generates the files needs grafana-foundation-sdk, the daemon not.
"""
