"""The dashboards' expressions where series come, go and share devices."""

from collections.abc import Mapping
from typing import Any

from tests.cases import cases
from tests.dashboards.conftest import CheckRules
from tests.dashboards.expressions import ALL, dashboards, expressions, substituted
from warpwatch_dashboards import queries
from warpwatch_devices.attribution.control_groups import DeviceProcessesOrigin, owner_of
from warpwatch_exporters.prometheus import Options, render
from warpwatch_telemetry.samples import (
    Attribution,
    Device,
    DeviceProcess,
    DeviceSample,
    Pod,
    ProcessOwner,
)
from warpwatch_telemetry.state import State

CHOSEN = dict.fromkeys(("cluster", "node", "instance", "namespace", "job"), ALL)
CHOSEN |= {"__rate_interval": "5m", "__interval": "1m", "__interval_ms": "60000", "__range": "30m"}
# Between two samples: a range that begins with a sample has it in some versions of Prometheus only.
SECONDS = "30s"
Series = Mapping[str, Any]


def shown(name: str, where: str, by: str = "", **values: str) -> str:
    """The expression of a panel or variable, rounded to a multiple of ``by``."""
    asked = expressions(dashboards()[name], {**CHOSEN, **values})
    found = next(one.promql for one in asked if one.where.endswith(f": {where}"))
    return f"round({found}, {by})" if by else found


READ = cases(__file__)
XIDS = 'warpwatch_device_xid_errors_total{instance="a"}'
BUSY = 'rate(warpwatch_device_busy_seconds_total{instance="a"}[10m])'
EXPRESSIONS = {
    "rare events": f"sum by (instance) ({queries.grown(XIDS, '5m')})",
    "rank's busy": f"count({queries.of_ranks(BUSY)})",
    "pod's busy": f"count({queries.of_workloads(BUSY)})",
    "holder's busy": f"count({queries.of_allocations(BUSY)})",
    "GPUs by namespace": f"sum by (namespace) ({queries.allocations()})",
    "unused GPUs by pod": (
        f"sum by (namespace, pod) ({queries.of_workloads(f'{BUSY} < bool 0.05')})"
    ),
    "own time": f"round({queries.own_s()}, 1e-6)",
    "steps a second": queries.STEPS_PER_SECOND,
    "order of ranks": queries.in_order("up"),
} | {name: shown(**one) for name, one in READ["shown"].items()}


def of_promtool(name: str, promql: str, minute: int, series: Series, answers: Series) -> Any:
    samples = [{"labels": labels, "value": value} for labels, value in answers.items()]
    check = {"expr": substituted(promql, CHOSEN), "eval_time": f"{minute}m{SECONDS}"}
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [{**check, "exp_samples": samples}],
    }


def test_every_expression_answers_what_its_case_says(check_rules: CheckRules) -> None:
    tests = [
        of_promtool(name, EXPRESSIONS[one.pop("expression")], **one)
        for name, some in READ["cases"].items()
        for one in some
    ]
    check_rules({"tests": tests})


TRAINING, NOTEBOOK = (f"{digit * 8}-2a99-45ad-af94-d91eb81a87e9" for digit in "12")
# Two processes of the training, one of the notebook, and the fourth of no pod.
PODS = {4000001: TRAINING, 4000002: TRAINING, 4000003: NOTEBOOK}


def owner(pid: int, name: str) -> ProcessOwner | None:
    group = f"0::/kubepods/pod{PODS[pid]}/{'a' * 64}\n" if pid in PODS else "0::/user.slice\n"
    return owner_of(group, name)


def test_the_use_of_a_gpu_is_that_of_the_pods_of_its_processes(check_rules):
    """From the driver's processes to the panel's expression."""
    used = tuple(DeviceProcess(pid, "python", 2**30, 0.15) for pid in (*PODS, 4000004))
    sample = DeviceSample(Device("GPU-0", 0, "H100"), 1.0, processes=used)
    found = DeviceProcessesOrigin(read=owner, host_processes=lambda: True).read([sample], 1.0)
    names = {TRAINING: Pod("ml", "llama-0"), NOTEBOOK: Pod("web", "notebook")}
    pods = Attribution("kubelet", 1.0, pods=names)
    state = State(1.0, "1", "gpu-1", devices=(sample,), attributions=(*found.attributions, pods))
    page = render(state, Options(profile="default")).decode().splitlines()
    lines = [line.rpartition(" ") for line in page if line.startswith("warpwatch_process")]
    of = 'gpu="0", uuid="GPU-0"'
    expected = {
        f'{{{of}, namespace="ml", pod="llama-0"}}': 0.3,
        f'{{{of}, namespace="web", pod="notebook"}}': 0.15,
        f"{{{of}}}": 0.15,
    }
    promql = shown("node", "GPU use by pod A", "0.001")
    case = of_promtool("shared", promql, 0, {key: value for key, _, value in lines}, expected)
    check_rules({"tests": [case]})
