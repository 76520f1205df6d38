"""What the dashboards' expressions answer where series come, go and share devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.dashboards.conftest import Promtool
from tests.dashboards.expressions import ALL, dashboards, expressions, substituted
from warpwatch_dashboards.job_queries import STEPS_PER_SECOND, in_order, of_ranks, own_s
from warpwatch_dashboards.queries import allocations, grown, of_allocations, of_workloads
from warpwatch_devices.attribution.control_groups import owner_of
from warpwatch_devices.attribution.device_processes import DeviceProcessesOrigin
from warpwatch_exporters.prometheus import Options, render
from warpwatch_telemetry.attribution import Attribution, Pod, ProcessOwner
from warpwatch_telemetry.samples import Device, DeviceProcess, DeviceSample
from warpwatch_telemetry.state import State

CHOSEN = {
    "cluster": ALL,
    "node": ALL,
    "instance": ALL,
    "namespace": ALL,
    "job": ALL,
    "__rate_interval": "5m",
    "__interval": "1m",
    "__range": "30m",
}
Series = Mapping[str, str]
Expected = Mapping[str, float]


def workload(namespace: str, pod: str, uuid: str = "GPU-0") -> str:
    held = f'uuid="{uuid}", namespace="{namespace}", pod="{pod}"'
    return f'warpwatch_device_workload_info{{instance="a", {held}}}'


def busy(pod: str) -> str:
    return f'warpwatch_device_busy_seconds_total{{instance="a", uuid="GPU-0", pod="{pod}"}}'


def shown(name: str, where: str, **values: str) -> str:
    """The expression of a panel or variable."""
    asked = expressions(dashboards()[name], {**CHOSEN, **values})
    (found,) = (one.promql for one in asked if one.where.endswith(where))
    return found


XIDS = 'warpwatch_device_xid_errors_total{instance="a"}'
BUSY = 'rate(warpwatch_device_busy_seconds_total{instance="a"}[10m])'
RANK = 'warpwatch_rank_info{instance="a", training_job="bert", rank="0", device="GPU-0"}'
SHARED = {
    RANK: "1x40",
    RANK.replace("bert", "gpt").replace("GPU-0", "GPU-1"): "1x10 stale",
    workload("ml", "p", "GPU-0"): "1x40",
    workload("web", "p", "GPU-0"): "1x40",
    workload("ml", "p", "GPU-1"): "1x10 stale",
    workload("web", "p", "GPU-1"): "_x15 1x20",
}
BERT, GPT = '{training_job="bert"}', '{training_job="gpt"}'
CHANGING = {
    busy("one"): "0+60x10 stale",
    busy("two"): "_x11 600+30x20",
    workload("ml", "two"): "_x11 1x20",
    RANK: "1x40",
}
HELD = 'instance="a", uuid="GPU-0"'
OF_SLURM = {
    f"warpwatch_device_up{{{HELD}}}": "1x20",
    'warpwatch_device_up{instance="a", uuid="GPU-1"}': "1x20",
    f'warpwatch_device_slurm_job_info{{{HELD}, slurm_job="42", user="ann"}}': "1x20",
    f"warpwatch_device_busy_seconds_total{{{HELD}}}": "0x20",
}
ON_SLURM = {RANK: "1x40", f'warpwatch_device_slurm_job_info{{{HELD}, user="ann"}}': "1x40"}
LABELS = 'instance="a", training_job="bert", rank="0"'
OWN = {
    f"warpwatch_step_duration_seconds_sum{{{LABELS}}}": "0+60x20",
    f"warpwatch_step_duration_seconds_count{{{LABELS}}}": "0+10x20",
    **{
        f'warpwatch_phase_seconds_total{{{LABELS}, phase="{phase}"}}': f"0+{seconds}x20"
        for phase, seconds in {"comm": 10, "checkpoint": 15, "eval": 5, "forward": 30}.items()
    },
}
SLOWER = {
    f"warpwatch_step_seconds_total{{{LABELS}}}": "0+60x10 664.8+64.8x10",
    f"warpwatch_step_duration_seconds_count{{{LABELS}}}": "0+120x21",
}
REPLACED = {
    'warpwatch_steps_total{instance="a", training_job="bert", rank="0"}': "0+60x30 stale",
    'warpwatch_steps_total{instance="b", training_job="bert", rank="0"}': "_x31 1860+60x30",
}
ONE_OWNER = {RANK: "1x20", workload("ml", "one"): "1x20"}
FOUND = f'{{{LABELS}, namespace="ml", pod="one"}}'
OWNERS = shown("training-job", "Where ranks run B")
# What each minute answers: expression, minute, series, labels of each answer with its value.
CASES: dict[str, list[tuple[str, int, Series, Expected]]] = {
    "rare events are counted once": [
        (f"sum by (instance) ({grown(XIDS, '5m')})", minute, {XIDS: values}, expected)
        for values, minute, expected in (
            ("_x10 1x20", 12, {"{instance='a'}": 1}),
            ("_x10 1 1 3x20", 13, {"{instance='a'}": 3}),
            ("5x10 6x20", 12, {"{instance='a'}": 1}),
            # One since the daemon was restarted.
            ("5x10 1x20", 12, {"{instance='a'}": 1}),
            # A scrape that failed is no event.
            ("5x10 stale 5x20", 16, {}),
            ("5x30", 25, {}),
            ("0x30", 25, {}),
        )
    ],
    "a device has one value while its pod changes": [
        (f"count({promql})", 14, CHANGING, {"{}": 1})
        for promql in (of_workloads(BUSY), of_allocations(BUSY), of_ranks(BUSY))
    ],
    "a GPU of a Slurm job is its user's and not free": [
        (
            f"sum by (namespace) ({allocations()})",
            12,
            OF_SLURM,
            {'{namespace="ann"}': 1.0, '{namespace="(free)"}': 1.0},
        ),
        (
            f"sum by (namespace, pod) ({of_workloads(f'{BUSY} < bool 0.05')})",
            12,
            OF_SLURM,
            {'{namespace="ann", pod="42"}': 1},
        ),
    ],
    "own time is without checkpoints and evaluation": [
        (f"round({own_s()}, 1e-6)", 15, OWN, {f"{{{LABELS}}}": 3})
    ],
    "a step that takes 8 % longer is seen in the mean": [
        (f"round({shown('training-job', 'Step time A')}, 0.001)", minute, SLOWER, {BERT: step_s})
        for minute, step_s in ((10, 0.5), (20, 0.54))
    ],
    "a replaced agent halves no steps": [(STEPS_PER_SECOND, 33, REPLACED, {BERT: 1})],
    "ranks stand in the order of their numbers": [
        (
            in_order("up"),
            3,
            {f'up{{rank="{rank}"}}': "1x5" for rank in (7, 64, 1023, 16384)},
            {f'up{{rank="{rank}"}}': 1.0 for rank in ("00007", "00064", "01023", "16384")},
        )
    ],
    "a job on a shared GPU is one of each namespace, an ended one of its own": [
        (shown("training-job", "variable job", namespace=namespace), 25, SHARED, jobs)
        for namespace, jobs in (
            ("ml", {BERT: 1, GPT: 1}),
            ("web", {BERT: 1, GPT: 1}),
            ("other", {}),
        )
    ],
    "a job on the GPU of a Slurm job is one of its user alone": [
        (shown("training-job", "variable job", namespace=user), 25, ON_SLURM, jobs)
        for user, jobs in (("ann", {BERT: 1}), ("bob", {}))
    ],
    "of pods that share a GPU none is said to be the rank's": [
        (OWNERS, 10, ONE_OWNER, {FOUND: 1}),
        (OWNERS, 10, ONE_OWNER | {workload("ml", "two"): "1x20"}, {}),
    ],
}


def of_promtool(name: str, promql: str, minute: int, series: Series, expected: Expected) -> Any:
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    check = {"expr": substituted(promql, CHOSEN), "eval_time": f"{minute}m"}
    return {
        "name": name,
        "interval": "1m",
        "input_series": [{"series": key, "values": values} for key, values in series.items()],
        "promql_expr_test": [{**check, "exp_samples": samples}],
    }


def test_every_expression_answers_what_its_case_says(promtool: Promtool, tmp_path: Path) -> None:
    tests = [of_promtool(name, *case) for name, cases in CASES.items() for case in cases]
    path = tmp_path / "test.yaml"
    path.write_text(yaml.dump({"tests": tests}, Dumper=yaml.CSafeDumper))
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr


TRAINING, NOTEBOOK = (f"{digit * 8}-2a99-45ad-af94-d91eb81a87e9" for digit in "12")
# Two processes of the training, one of the notebook, and the fourth of no pod.
PODS = {4000001: TRAINING, 4000002: TRAINING, 4000003: NOTEBOOK}


def owner(pid: int, name: str) -> ProcessOwner | None:
    group = f"0::/kubepods/pod{PODS[pid]}/{'a' * 64}\n" if pid in PODS else "0::/user.slice\n"
    return owner_of(group, name)


def test_the_use_of_a_gpu_is_that_of_the_pods_of_its_processes(
    promtool: Promtool, tmp_path: Path
) -> None:
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
    promql = f"round({shown('node', 'GPU use by pod A')}, 0.001)"
    case = of_promtool("shared", promql, 0, {key: value for key, _, value in lines}, expected)
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [case]}))
    done = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
