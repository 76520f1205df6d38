"""One file per way out; each turns the state into another program's format.

- series: every series of a state, for the formats that are made of series
- prometheus: text exposition and OpenMetrics; dcgm_names: the names that dcgm-exporter has for them
- collector: the state as a collector of prometheus_client, for other people's registries
- exposition: the grammar of both formats
- jsonl: the telemetry log
- events: what has just happened, for what tells of it; links: where people read more
- otlp, otlp_metrics, otlp_logs: OpenTelemetry; webhooks: messages
- grafana, grafana_api: annotations
- ways_out: runs the configured exporters that push
- config: the section ``exporters``
"""
