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
# A fleet is no agent of a node: its scrape job, as the chart's monitors and docs/alerts.md call it.
NO_FLEET, FLEET = 'job!="warpwatch-fleet"', 'job="warpwatch-fleet"'
DEVICE_KEY = f"{PLACE}, gpu, uuid, gpu_instance, profile"
RANK_KEY = f"{PLACE}, owner, training_job, rank"
_ALLOCATED = f"{PLACE}, uuid, gpu_instance"

# What panels.py makes of the first two: the node, or the address where there is no such label.
NODE_LEGEND = "{{node}}|{{instance}}"
GPU_LEGEND = f"{NODE_LEGEND}|GPU {{{{gpu}}}} {{{{profile}}}} {{{{gpu_instance}}}}"
RANK_LEGEND = "{{training_job}} {{rank}}"

WINDOW = "$__rate_interval"


@dataclass(frozen=True, slots=True)
class Query:
    """``legend``: Grafana's template of a series' name."""

    promql: str
    legend: str = ""


def series(name: str, where: str = AGENT, *more: str) -> str:
    """The selector of a metric, named without its prefix."""
    return f"{PREFIX}{name}{{{','.join((where, *more))}}}"


def anomalies(name: str) -> str:
    """An agent's and a fleet's, which are put on their node's agent: in Kubernetes its instance."""
    of_fleet = f'label_replace({series(name, AGENT, FLEET)}, "instance", "$1", "node", "(.+)")'
    return f"({series(name, AGENT, NO_FLEET)} or {of_fleet})"


def by_node(expression: str, *labels: str) -> Query:
    """One series a node, and by these labels."""
    own = " ".join(f"{{{{{label}}}}}" for label in labels)
    return Query(expression, f"{NODE_LEGEND}|{own}" if own else NODE_LEGEND)


def recorded(rule: str, by_hand: str) -> str:
    """A recording rule's series; where the rules are not loaded, what they would record."""
    return f"({PREFIX[:-1]}:{rule}{{{AGENT}}} or {by_hand})"


def rate(selector: str, window: str = WINDOW) -> str:
    """Per second."""
    return f"rate({selector}[{window}])"


def total(by: str, expression: str) -> str:
    return f"sum by ({by}) ({expression})"


def grown(selector: str, window: str) -> str:
    """What a counter of rare events has grown by, where it has.

    Such a series begins with its first event, at 1: its first value counts too, which increase()
    leaves out. A series is no beginning that was there within an hour before, as around a scrape
    that failed.
    """
    began = f"{selector} > 0 unless count_over_time({selector}[1h] offset {window})"
    return f"(({began}) or round(increase({selector}[{window}])) > 0)"


def by_allocation(device_expression: str) -> str:
    """One value a device: while its workload changes it has series with the old labels as well."""
    return f"max by ({_ALLOCATED}) ({device_expression})"


def workloads(namespace: str = 'namespace=~"$namespace"') -> str:
    """1 for each container that a device is allocated to, in the chosen namespaces.

    A Slurm job is called a pod, and its user a namespace, where no container has the device.
    """
    slurm = series("device_slurm_job_info", AGENT, namespace.replace("namespace", "user", 1))
    named = f'label_replace({slurm}, "namespace", "$1", "user", "(.+)")'
    named = f'label_replace({named}, "pod", "$1", "slurm_job", "(.+)")'
    containers = series("device_workload_info", AGENT, namespace)
    taken = series("device_workload_info")
    return f"({containers} or ({named} unless on ({_ALLOCATED}) {taken}))"


def of_workloads(device_expression: str) -> str:
    """A device's value for each container that it is allocated to."""
    return f"{workloads()} * on ({_ALLOCATED}) group_left () {by_allocation(device_expression)}"


def allocations() -> str:
    """1 for each container that a device is allocated to, and for each device that none has."""
    instances = series("device_up", AGENT, 'gpu_instance!=""')
    # A MIG GPU is no device beside its instances.
    whole = f"{series('device_up')} unless on ({PLACE}, gpu) {instances}"
    # One that cannot be read, which has 0 there, is a device, too.
    free = f"(({whole} or {instances}) >= bool 0)"
    for holder in ("namespace", "account", "partition"):
        free = f'label_replace({free}, "{holder}", "(free)", "", "")'
    taken = f"({series('device_workload_info')} or {series('device_slurm_job_info')})"
    return f"({workloads()} or ({free} unless on ({_ALLOCATED}) {taken}))"


def of_allocations(device_expression: str) -> str:
    return f"{allocations()} * on ({_ALLOCATED}) group_left () {by_allocation(device_expression)}"
