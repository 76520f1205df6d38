"""PromQL from parts: whose series, their rates, and joins of devices with workloads.

Every selector takes the variables of its dashboard. A label that a series lacks equals the empty
one, which the value of All, ``.*``, matches: the same query works on bare hosts and in Kubernetes.
"""

from __future__ import annotations

from dataclasses import dataclass

from warpwatch_telemetry.metric import PREFIX

AGENT = 'cluster=~"$cluster",node=~"$node",instance=~"$instance"'
DEVICE = f'{AGENT},gpu=~"$gpu"'
JOB = f'{AGENT},training_job=~"$job"'

PLACE = "cluster, node, instance"
# A fleet's own scrape job, not an agent's, as the chart's monitors and docs/alerts.md call it.
NO_FLEET, FLEET = 'job!="warpwatch-fleet"', 'job="warpwatch-fleet"'
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


def anomalies(name: str) -> str:
    """Return the anomalies of agents and of a fleet, which belong to their node's agent."""
    of_fleet = f'label_replace({series(name, AGENT, FLEET)}, "instance", "$1", "node", "(.+)")'
    return f"({series(name, AGENT, NO_FLEET)} or {of_fleet})"


def by_node(expression: str, *labels: str) -> Query:
    """Return one series per node, and by these labels."""
    own = " ".join(f"{{{{{label}}}}}" for label in labels)
    return Query(expression, f"{NODE_LEGEND}|{own}" if own else NODE_LEGEND)


def recorded(rule: str, by_hand: str) -> str:
    """Return the series of a recording rule; without the rules, their expression."""
    return f"({PREFIX[:-1]}:{rule}{{{AGENT}}} or {by_hand})"


def rate(selector: str, window: str = WINDOW) -> str:
    """Return the growth per second."""
    return f"rate({selector}[{window}])"


def total(by: str, expression: str) -> str:
    return f"sum by ({by}) ({expression})"


def grown(selector: str, window: str) -> str:
    """Return the growth of a counter of rare events, if any."""
    began = f"{selector} > 0 unless count_over_time({selector}[1h] offset {window})"
    return f"(({began}) or round(increase({selector}[{window}])) > 0)"


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
    """Return 1 for each container with a device, and for each device without any."""
    instances = series("device_up", AGENT, 'gpu_instance!=""')
    # A GPU in MIG mode does not count beside its instances.
    whole = f"{series('device_up')} unless on ({PLACE}, gpu) {instances}"
    # One that cannot be read, which has 0 there, is a device, too.
    free = f"(({whole} or {instances}) >= bool 0)"
    for holder in ("namespace", "account", "partition"):
        free = f'label_replace({free}, "{holder}", "(free)", "", "")'
    taken = f"({series('device_workload_info')} or {series('device_slurm_job_info')})"
    return f"({workloads()} or ({free} unless on ({_ALLOCATED}) {taken}))"


def of_allocations(device_expression: str) -> str:
    return f"{allocations()} * on ({_ALLOCATED}) group_left () {by_allocation(device_expression)}"
