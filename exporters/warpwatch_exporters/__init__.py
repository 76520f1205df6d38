"""Turns the state into the formats of other programs, one file per exporter.

- series: every series of a state, for the formats that consist of series
- prometheus: text exposition and OpenMetrics, also under dcgm-exporter's names
- collector: the state as a collector of prometheus_client, for other registries
- jsonl: the telemetry log
- events: new anomalies and captures, their ends, and the links to their pages
- otlp: OpenTelemetry; webhooks: messages
- push: runs the configured exporters that push
- config: the section ``exporters``
"""
