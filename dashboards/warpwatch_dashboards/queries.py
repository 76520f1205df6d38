"""PromQL from parts: whose series, their rates, joins of devices with workloads, steps and ranks.

Every selector takes the variables of its dashboard. A label that a series lacks equals the empty
one, which the value of All, ``.*``, matches: the same query works on bare hosts and in Kubernetes.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpwatch_telemetry.metric import PREFIX

AGENT = 'cluster=~"$cluster",node=~"$node",instance=~"$instance"'
DEVICE = f'{AGENT},gpu=~"$gpu"'
OF_JOB = 'training_job=~"$job"'
JOB = f"{AGENT},{OF_JOB}"

PLACE = "cluster, node, instance"
# A fleet's own scrape job, not an agent's, as the chart's monitors and docs/alerts.md call it.
NO_FLEET, FLEET = 'job!="warpwatch-fleet"', 'job="warpwatch-fleet"'
# The name of the scrape job in the chart's monitors and docs/dashboards.md.
SCRAPED = f'up{{job="warpwatch",{AGENT}}}'
DEVICE_KEY = f"{PLACE}, gpu, uuid, gpu_instance, profile"
RANK_KEY = f"{PLACE}, owner, training_job, rank"
_ALLOCATED = f"{PLACE}, uuid, gpu_instance"

# panels.py turns the first two into the node, or the address where there is no such label.
NODE_LEGEND = "{{node}}|{{instance}}"
GPU_LEGEND = f"{NODE_LEGEND}|GPU {{{{gpu}}}} {{{{profile}}}} {{{{gpu_instance}}}}"
RANK_LEGEND = "{{training_job}} {{rank}}"

WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """A query. legend: Grafana's template of a series' name."""

    promql: str
    legend: str = ""


def series(name: str, where: str = AGENT, *more: str) -> str:
    """Return the selector of a metric, named without its prefix."""
    return f"{PREFIX}{name}{{{','.join((where, *more))}}}"


def _at_agents(of_fleet: str, by: str, agents: str) -> str:
    """Return series of a fleet with the ``instance`` of a chosen agent that has the same ``by``."""
    # Two workers of a fleet may have the same series while one takes over from the other.
    once = f"max without (instance) ({of_fleet})"
    return f"{once} * on ({by}) group_left (instance) topk by ({by}) (1, {agents})"


def at_nodes(name: str, *more: str) -> str:
    """Return the series of a fleet that name a node, with the instance of its agent."""
    agents = series("build_info", AGENT, NO_FLEET, 'node!=""')
    return _at_agents(series(name, 'cluster=~"$cluster"', FLEET, *more), "cluster, node", agents)


def anomalies(*more: str) -> str:
    """Return the anomalies of the chosen agents, and those of a fleet about their nodes and jobs.

    ``more`` selects jobs. An anomaly without a node has the instance of an agent with ranks of its
    job. With All agents chosen, the others of the fleet have its own.
    """
    name = "anomaly_info"
    of_jobs = series(name, 'cluster=~"$cluster",node=""', FLEET, *more)
    found = (
        series(name, AGENT, NO_FLEET, *more),
        at_nodes(name, *more),
        _at_agents(of_jobs, BY_JOB, series("rank_info", AGENT, *more)),
    )
    others = series(name, AGENT, FLEET, *more)
    return f"({' or '.join(found)} or on ({BY_JOB}, kind, rank) {others})"


def recorded(rule: str, by_hand: str) -> str:
    """Return the series of a recording rule; without the rules, their expression."""
    return f"({PREFIX[:-1]}:{rule}{{{AGENT}}} or {by_hand})"


def rate(selector: str, window: str = WINDOW) -> str:
    """Return the growth per second."""
    return f"rate({selector}[{window}])"


def total(by: str, expression: str) -> str:
    return f"sum by ({by}) ({expression})"


def increased(selector: str, window: str) -> str:
    """Return the growth of a counter that a driver has from the start, if any."""
    return f"round(increase({selector}[{window}])) > 0"


def grown(selector: str, window: str) -> str:
    """Return the growth of a counter of rare events that begins with the first one, if any."""
    began = f"{selector} > 0 unless count_over_time({selector}[1h] offset {window})"
    return f"(({began}) or {increased(selector, window)})"


def by_allocation(device_expression: str) -> str:
    """Return one value per device: while its workload changes, it also has old labels."""
    return f"max by ({_ALLOCATED}) ({device_expression})"


def workloads(namespace: str = 'namespace=~"$namespace"') -> str:
    """Return 1 for each container with a device, in the chosen namespaces."""
    slurm = series("device_slurm_job_info", AGENT, namespace.replace("namespace", "user", 1))
    named = f'label_replace({slurm}, "namespace", "$1", "user", "(.+)")'
    named = f'label_replace({named}, "pod", "$1", "slurm_job", "(.+)")'
    containers = series("device_workload_info", AGENT, namespace)
    taken = series("device_workload_info")
    return f"({containers} or ({named} unless on ({_ALLOCATED}) {taken}))"


def of_workloads(device_expression: str) -> str:
    """Return a device's value for each container that it is allocated to."""
    return f"{workloads()} * on ({_ALLOCATED}) group_left () {by_allocation(device_expression)}"


def allocations() -> str:
    """Return each container's part of its device, and 1 for each device without any."""
    instances = series("device_up", AGENT, 'gpu_instance!=""')
    # A GPU in MIG mode does not count beside its instances.
    whole = f"{series('device_up')} unless on ({PLACE}, gpu) {instances}"
    # One that cannot be read, which has 0 there, is a device, too.
    free = f"(({whole} or {instances}) >= bool 0)"
    for holder in ("namespace", "account", "partition"):
        free = f'label_replace({free}, "{holder}", "(free)", "", "")'
    taken = f"({series('device_workload_info')} or {series('device_slurm_job_info')})"
    # Containers that share a device have equal parts of it.
    of_all = workloads('namespace=~".*"')
    held = f"{workloads()} / on ({_ALLOCATED}) group_left () count by ({_ALLOCATED}) ({of_all})"
    return f"({held} or ({free} unless on ({_ALLOCATED}) {taken}))"


def of_allocations(device_expression: str) -> str:
    return f"{allocations()} * on ({_ALLOCATED}) group_left () {by_allocation(device_expression)}"


BY_JOB = "cluster, owner, training_job"
JOB_LEGEND = "{{training_job}}"
# Time that is not a rank's own: waits for others, and pauses for all ranks.
_NOT_OWN = 'phase=~"comm|checkpoint|eval"'


def quantile_of_steps(quantile: float) -> str:
    """Return a quantile of step seconds over all ranks of a job."""
    buckets = total(f"le, {BY_JOB}", rate(series("step_duration_seconds_bucket", JOB)))
    return f"histogram_quantile({quantile}, {buckets})"


def mean_of_steps() -> str:
    """Return the mean seconds of a step over all ranks of a job."""
    spent = total(BY_JOB, rate(series("step_seconds_total", JOB)))
    return f"{spent} / {total(BY_JOB, rate(series('step_duration_seconds_count', JOB)))}"


def step_s() -> str:
    """Return the mean seconds of a step, by rank."""
    sums = total(RANK_KEY, rate(series("step_duration_seconds_sum", JOB)))
    counts = total(RANK_KEY, rate(series("step_duration_seconds_count", JOB)))
    return f"{sums} / {counts}"


def own_s(where: str = JOB) -> str:
    """Return the mean seconds of a step without waits for others and declared pauses, by rank."""
    steps = total(RANK_KEY, rate(series("step_duration_seconds_sum", where)))
    waits = total(RANK_KEY, rate(series("phase_seconds_total", where, _NOT_OWN)))
    counts = total(RANK_KEY, rate(series("step_duration_seconds_count", where)))
    return f"({steps} - ({waits} or {steps} * 0)) / {counts}"


RUNNING = total(BY_JOB, series("rank_up", JOB))


def share_of_time(rule: str) -> str:
    """Return a recorded share of a job's time, while it has ranks."""
    return f"warpwatch:job:{rule} and on ({BY_JOB}) {RUNNING}"


def lateness(where: str = JOB) -> str:
    """Return a rank's own time over the median of like ranks of its job on all nodes, less 1."""
    own = own_s(where)
    median = f"quantile by ({BY_JOB}) (0.5, {own})"
    by_hand = f"({own}) / on ({BY_JOB}) group_left () {median}"
    rule = f"warpwatch:rank:local_seconds:ratio_to_job_median{{{where}}}"
    return f"(max by ({RANK_KEY}) ({rule}) or {by_hand}) - 1"


def ranks_by_device() -> str:
    """Return 1 for each rank, with its device's UUID."""
    ranks = f'label_replace({series("rank_info", JOB)}, "uuid", "$1", "device", "(.+)")'
    return f"max by ({RANK_KEY}, uuid) ({ranks})"


def of_ranks(device_expression: str) -> str:
    """Return a device's value for each rank that runs on it."""
    device = f"max by ({PLACE}, uuid) ({device_expression})"
    return f"{ranks_by_device()} * on ({PLACE}, uuid) group_left () {device}"


def in_order(expression: str) -> str:
    """Pad ranks to five digits: Prometheus sorts by letters, 10 before 2."""
    padded = f'label_replace({expression}, "rank", "0000$1", "rank", "(.+)")'
    return f'label_replace({padded}, "rank", "$1", "rank", ".*(.{{5}})")'


# For the median rank. By rank first: an agent that is replaced goes on under another instance.
_STEPS_OF_RANKS = total(f"{BY_JOB}, rank", rate(series("steps_total", JOB)))
STEPS_PER_SECOND = f"quantile by ({BY_JOB}) (0.5, {_STEPS_OF_RANKS})"
BUSY_OF_RANKS = of_ranks(rate(series("device_busy_seconds_total")))
MEMORY_OF_RANKS = of_ranks(
    f"{series('device_memory_used_bytes')} / {series('device_memory_total_bytes')}"
)
# In the order of the ranks' numbers.
STEP_S_OF_RANKS = in_order(step_s())
OWN_S_OF_RANKS = in_order(own_s())
LATENESS_IN_JOB, LATENESS = lateness(), lateness(AGENT)

_BUSY = rate(series("device_busy_seconds_total"))
NODE_BUSY = recorded("node:device_busy:ratio_rate5m", f"avg by ({PLACE}) ({_BUSY})")
IDLE_RATIO = 0.05
IDLE_WORKLOADS = by_allocation(of_workloads(f"{_BUSY} < bool {IDLE_RATIO}"))
ALLOCATIONS, UNUSED_ALLOCATIONS = allocations(), of_allocations(f"1 - {_BUSY}")
