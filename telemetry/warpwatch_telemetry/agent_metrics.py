"""Every metric of the daemon itself: one row each. Every decision that it takes is visible here."""

from __future__ import annotations

from warpwatch_telemetry.metric import Metric, metric


def _row(name: str, help: str, *labels: str, origin: str = "daemon") -> Metric:
    return metric(name, help, "agent", origin, *labels)


_FINDINGS = (
    _row("anomalies_total", "Anomalies raised.", "kind", "severity"),
    _row(
        "anomalies_suppressed_total",
        "Findings that were not raised because another anomaly explains them.",
        *("kind", "cause"),
    ),
    _row(
        "detection_refused_total",
        "What was too much for the detection: anomalies not raised, jobs forgotten early.",
        "what",
    ),
    _row(
        "detector_errors_total",
        "What a detector could not take, by its kind: a fault of the agent; the others go on.",
        "kind",
    ),
    _row(
        "anomaly_store_errors_total",
        "What the history of anomalies and the detectors' memory lost: read, write, snapshot, "
        "queue.",
        "operation",
    ),
    _row(
        "detector_blind",
        "Whether noise, or want of like ranks, hides from a detector what it is to find.",
        *("kind", "training_job", "owner"),
    ),
    _row(
        "anomaly_active",
        "Anomalies that are active now, by each kind; of a fleet by node as well.",
        *("kind", "node"),
    ),
    _row(
        "anomaly_info",
        "What an active anomaly is about, how bad it is and on which node; always 1. At most 200, "
        "of each kind and severity the newest. summary: cause, place, owner and begin in one "
        "sentence that stays as it is; link: its page, with http.public_url.",
        *("kind", "severity", "scope", "training_job", "rank", "owner", "namespace", "user"),
        *("gpu", "uuid", "pod", "node", "summary", "link"),
    ),
    _row(
        "captures_total",
        "Captures asked for, also those not taken: the outcome says why. Of at most 64 owners.",
        *("kind", "trigger", "outcome", "namespace", "user"),
    ),
    _row(
        "capture_problems_total",
        "What traces lacked when they were verified: unreadable, no_operators, "
        "no_kernels, steps, rank, timestamps.",
        "problem",
    ),
    _row(
        "capture_cost_seconds_total",
        "What captures cost one rank: the steps that started, recorded and exported them, less "
        "what they used to take.",
        "kind",
    ),
    _row(
        "capture_residual_ratio",
        "Median step after a job's newest capture by the median before it; 1: nothing stayed.",
        *("training_job", "owner"),
    ),
    _row(
        "alerts_received_total",
        "Alerts that webhooks brought, by what became of them: captured, or why not.",
        "outcome",
    ),
    _row("store_captures", "Captures in the store."),
    _row("store_bytes", "Size of the store."),
    _row(
        "uploads_total",
        "Copied to the remote store, captures and runs: uploaded, failed (tried again), given_up "
        "(removed before that).",
        *("what", "outcome"),
    ),
    _row("upload_bytes_total", "Copied to the remote store."),
    _row("uploads_pending", "What is not in the remote store yet.", "what"),
)

_INPUT = (
    _row("source_up", "Whether a source can be read.", "source"),
    _row("source_duration_seconds", "How long the newest reading of a source took.", "source"),
    _row("source_errors_total", "Readings of a source that failed.", "source"),
    _row("nvml_calls_total", "Calls of NVML by reader, all devices together.", "reader"),
    _row(
        "nvml_call_seconds_total", "Time spent in NVML by reader, all devices together.", "reader"
    ),
    _row(
        "nvml_errors_total",
        "Answers of NVML other than success and not supported, by reader and return code.",
        *("reader", "code"),
    ),
    _row(
        "attribution_timestamp_seconds",
        "When it was last read with success whose work runs where "
        "(kubelet, slurm, cgroup, pod_logs).",
        "origin",
    ),
    _row("attribution_errors_total", "Readings of an origin that failed.", "origin"),
    _row(
        "rendezvous_rejected_total",
        "Input from training processes that was refused, by reason.",
        "reason",
        origin="rendezvous",
    ),
    _row("ranks_unexported", "Ranks beyond the 1,000 whose series are exported."),
)

_SELF = (
    _row("build_info", "The version that runs; always 1.", "version"),
    _row("loop_failures_total", "Rounds of a loop that failed.", "loop"),
    _row("loop_duration_seconds", "How long the newest round of a loop took.", "loop"),
    _row("http_requests_total", "HTTP requests by status code.", "code"),
    _row("config_reloads_total", "Reloads of the configuration by result (ok, failed).", "result"),
    _row("jsonl_records_total", "Records written to the telemetry log."),
    _row("jsonl_errors_total", "Records that could not be written, e.g. to a full disk."),
    _row(
        "grafana_annotations_total",
        "Annotations in Grafana by result: written, updated, known, refused, failed, dropped.",
        "result",
    ),
    _row(
        "otlp_exports_total",
        "Requests with metrics, and log records, to the OpenTelemetry collector by result: sent, "
        "failed (logs are tried again), dropped (the queue was full).",
        *("signal", "result"),
    ),
    _row(
        "webhook_messages_total",
        "Messages to webhooks by result: sent, failed (tried again), refused, dropped.",
        "result",
    ),
    _row("agent_resident_memory_bytes", "Memory of the daemon.", origin="/proc/self"),
    _row("agent_cpu_seconds_total", "Processor time of the daemon.", origin="/proc/self"),
    _row("agent_open_files", "Open file descriptors.", origin="/proc/self"),
    _row("agent_threads", "Threads of the daemon.", origin="/proc/self"),
    _row(
        "agent_start_timestamp_seconds",
        "When the daemon was started (wall clock).",
        origin="/proc/self",
    ),
)

_FLEET = (
    _row("fleet_agents", "Agents by state: up (followed) or down.", "state", origin="fleet"),
    _row(
        "fleet_agent_up",
        "Whether the fleet follows an agent, named by its node, before it was reached by its "
        "address.",
        "node",
        origin="fleet",
    ),
    _row(
        "fleet_agent_lag_seconds",
        "How far the fleet is behind an agent that it follows.",
        "node",
        origin="fleet",
    ),
    _row("fleet_partitions", "Parts into which jobs are divided among fleets.", origin="fleet"),
    _row(
        "fleet_partition_judged",
        "Whether this fleet judges the jobs of a part that is its own: it follows at least one "
        "agent.",
        "partition",
        origin="fleet",
    ),
    _row(
        "fleet_refused_total",
        "What agents said and the fleet did not believe, by why.",
        "reason",
        origin="fleet",
    ),
    _row(
        "fleet_newer_total",
        "Lines of agents of a type, or with a field, that this version does not know and ignores.",
        "node",
        origin="fleet",
    ),
    _row(
        "fleet_agent_info",
        "Always 1: the version of an agent, as it says.",
        *("node", "version"),
        origin="fleet",
    ),
    _row(
        "fleet_kubernetes_errors_total",
        "Rounds of a fleet in its cluster in which the API server refused something or did not "
        "answer: events, conditions, taints, captures.",
        "what",
        origin="fleet",
    ),
    _row(
        "fleet_job_ranks",
        "Ranks of a job that are seen, over all nodes.",
        *("training_job", "owner", "run"),
        origin="fleet",
    ),
    _row(
        "fleet_job_nodes",
        "Nodes on which a job has live ranks.",
        *("training_job", "owner", "run"),
        origin="fleet",
    ),
    _row(
        "fleet_job_step_seconds",
        "Duration of a step of a job, over its newest twenty steps.",
        *("training_job", "owner", "run"),
        origin="fleet",
    ),
)

AGENT_METRICS = _FINDINGS + _INPUT + _SELF + _FLEET
