"""What the dashboards' expressions answer where series come, go and share devices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dashboards.conftest import Promtool
from tests.dashboards.expressions import ALL, dashboards, expressions, substituted
from warpwatch_dashboards.job_queries import STEPS_PER_SECOND, in_order, of_ranks, own_s
from warpwatch_dashboards.queries import allocations, grown, of_allocations, of_workloads

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
XIDS = 'warpwatch_device_xid_errors_total{instance="a"}'
BUSY = 'rate(warpwatch_device_busy_seconds_total{instance="a"}[10m])'
RANK = 'warpwatch_rank_info{instance="a", training_job="bert", rank="0", device="GPU-0"}'


def workload(namespace: str, pod: str, uuid: str = "GPU-0") -> str:
    held = f'uuid="{uuid}", namespace="{namespace}", pod="{pod}"'
    return f'warpwatch_device_workload_info{{instance="a", {held}}}'


def busy(pod: str) -> str:
    return f'warpwatch_device_busy_seconds_total{{instance="a", uuid="GPU-0", pod="{pod}"}}'


@pytest.fixture
def answers(promtool: Promtool, tmp_path: Path) -> Any:
    """Asks at a minute and compares: labels of each answer and its value."""

    def compare(
        promql: str, minute: int, series: Mapping[str, str], expected: Mapping[str, float]
    ) -> None:
        check = {
            "expr": substituted(promql, CHOSEN),
            "eval_time": f"{minute}m",
            "exp_samples": [{"labels": one, "value": value} for one, value in expected.items()],
        }
        inputs = [{"series": name, "values": values} for name, values in series.items()]
        case = {"interval": "1m", "input_series": inputs, "promql_expr_test": [check]}
        path = tmp_path / "test.yaml"
        path.write_text(yaml.safe_dump({"rule_files": [], "tests": [case]}))
        done = promtool("test", "rules", str(path))
        assert done.returncode == 0, done.stdout + done.stderr

    return compare


@pytest.mark.parametrize(
    ("values", "minute", "expected"),
    [
        ("_x10 1x20", 12, 1),
        ("_x10 1 1 3x20", 13, 3),
        ("5x10 6x20", 12, 1),
        ("5x10 1x20", 12, 1),
        ("5x10 stale 5x20", 16, None),
        ("5x30", 25, None),
        ("0x30", 25, None),
    ],
    ids=[
        "the first event begins the series",
        "what came after the first is counted with it",
        "one more",
        "one since the daemon was restarted",
        "a scrape that failed is no event",
        "nothing new",
        "nothing at all",
    ],
)
def test_rare_events_are_counted_once(
    answers: Any, values: str, minute: int, expected: float | None
) -> None:
    found = {} if expected is None else {"{instance='a'}": expected}
    summed = f"sum by (instance) ({grown(XIDS, '5m')})"
    answers(summed, minute, {XIDS: values}, found)


def test_a_device_has_one_value_while_its_pod_changes(answers: Any) -> None:
    series = {
        busy("one"): "0+60x10 stale",
        busy("two"): "_x11 600+30x20",
        workload("ml", "two"): "_x11 1x20",
        RANK: "1x40",
    }
    for promql in (of_workloads(BUSY), of_allocations(BUSY), of_ranks(BUSY)):
        answers(f"count({promql})", 14, series, {"{}": 1})


def test_a_gpu_of_a_slurm_job_is_its_users_and_not_free(answers: Any) -> None:
    where = 'instance="a", uuid="GPU-0"'
    series = {
        f"warpwatch_device_up{{{where}}}": "1x20",
        'warpwatch_device_up{instance="a", uuid="GPU-1"}': "1x20",
        f'warpwatch_device_slurm_job_info{{{where}, slurm_job="42", user="ann"}}': "1x20",
        f"warpwatch_device_busy_seconds_total{{{where}}}": "0x20",
    }
    held = {'{namespace="ann"}': 1.0, '{namespace="(free)"}': 1.0}
    answers(f"sum by (namespace) ({allocations()})", 12, series, held)
    idle = f"sum by (namespace, pod) ({of_workloads(f'{BUSY} < bool 0.05')})"
    answers(idle, 12, series, {'{namespace="ann", pod="42"}': 1})


def test_own_time_is_without_checkpoints_and_evaluation(answers: Any) -> None:
    labels = 'instance="a", training_job="bert", rank="0"'
    series = {
        f"warpwatch_step_duration_seconds_sum{{{labels}}}": "0+60x20",
        f"warpwatch_step_duration_seconds_count{{{labels}}}": "0+10x20",
    }
    for phase, seconds in {"comm": 10, "checkpoint": 15, "eval": 5, "forward": 30}.items():
        series[f'warpwatch_phase_seconds_total{{{labels}, phase="{phase}"}}'] = f"0+{seconds}x20"
    answers(f"round({own_s()}, 1e-6)", 15, series, {f"{{{labels}}}": 3})


def test_a_replaced_agent_halves_no_steps(answers: Any) -> None:
    rest = 'training_job="bert", rank="0"'
    series = {
        f'warpwatch_steps_total{{instance="a", {rest}}}': "0+60x30 stale",
        f'warpwatch_steps_total{{instance="b", {rest}}}': "_x31 1860+60x30",
    }
    answers(STEPS_PER_SECOND, 33, series, {'{training_job="bert"}': 1})


def test_ranks_stand_in_the_order_of_their_numbers(answers: Any) -> None:
    series = {f'up{{rank="{rank}"}}': "1x5" for rank in (7, 64, 1023, 16384)}
    padded = {f'up{{rank="{rank}"}}': 1.0 for rank in ("00007", "00064", "01023", "16384")}
    answers(in_order("up"), 3, series, padded)


def jobs_of(namespace: str) -> str:
    shown = expressions(dashboards()["training-job"], {"namespace": namespace, "__range": "30m"})
    (variable,) = (e.promql for e in shown if e.where.endswith("variable job"))
    return variable


def test_a_job_on_a_shared_gpu_is_one_of_each_namespace_and_an_ended_one_of_its_own(
    answers: Any,
) -> None:
    series = {
        RANK: "1x40",
        RANK.replace("bert", "gpt").replace("GPU-0", "GPU-1"): "1x10 stale",
        workload("ml", "p", "GPU-0"): "1x40",
        workload("web", "p", "GPU-0"): "1x40",
        workload("ml", "p", "GPU-1"): "1x10 stale",
        workload("web", "p", "GPU-1"): "_x15 1x20",
    }
    bert, gpt = '{training_job="bert"}', '{training_job="gpt"}'
    answers(jobs_of("ml"), 25, series, {bert: 1, gpt: 1})
    answers(jobs_of("web"), 25, series, {bert: 1, gpt: 1})
    answers(jobs_of("other"), 25, series, {})


def test_a_job_on_the_gpu_of_a_slurm_job_is_one_of_its_user_alone(answers: Any) -> None:
    held = 'warpwatch_device_slurm_job_info{instance="a", uuid="GPU-0", slurm_job="7", user="ann"}'
    series = {RANK: "1x40", held: "1x40"}
    answers(jobs_of("ann"), 25, series, {'{training_job="bert"}': 1})
    answers(jobs_of("bob"), 25, series, {})


def test_of_pods_that_share_a_gpu_none_is_said_to_be_the_ranks(answers: Any) -> None:
    shown = expressions(dashboards()["training-job"])
    (owners,) = (e.promql for e in shown if e.where.endswith("Where ranks run B"))
    series = {RANK: "1x20", workload("ml", "one"): "1x20"}
    one = '{instance="a", training_job="bert", rank="0", namespace="ml", pod="one"}'
    answers(owners, 10, series, {one: 1})
    answers(owners, 10, series | {workload("ml", "two"): "1x20"}, {})
