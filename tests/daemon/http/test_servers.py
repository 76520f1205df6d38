"""An inference server on the page and in ``warpwatch status``."""

from dataclasses import replace
from typing import Any

import pytest

from warpwatch_daemon.cli.status import _lines
from warpwatch_serving.page import jobs
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import JobState, RankState, ServeState, State

NAMED: dict[str, Any] = {"job": "chat", "owner": "ns/team", "run": "r", "pid": 1, "host": "gpu-1"}
JOB = JobState(
    "chat", 4, ("0", "1", "2", "3"), owner="ns/team", run="r", kind="serve", replica="a5fa77"
)


def process(rank: int, role: str = "rank", **serve: Any) -> RankState:
    said = {"role": role, "replica": "a5fa77", "server": "vllm 0.32.0", **serve}
    pace: dict[str, Any] = {"steps_per_s": 120.0, "recent_s": (0.008,)} if role == "rank" else {}
    return RankState(**NAMED, rank=rank, name=str(rank), serve=ServeState(**said), **pace)


def engine(**scheduler: Any) -> list[RankState]:
    note = "no latencies and prefix hits: vLLM's statistics are off (--disable-log-stats)"
    return [
        process(0),
        process(1),
        process(2, "scheduler", **scheduler),
        process(3, "frontend", note=note),
    ]


@pytest.mark.parametrize(
    ("scheduler", "load"),
    [
        (
            {"idle": False, "running": 12, "waiting": 3, "kv_usage": 0.45},
            ["12 running", "3 waiting", "KV cache 45 % used", "120 iterations/s"],
        ),
        ({"idle": True, "running": 0, "waiting": 0, "kv_usage": 0.0}, ["idle"]),
        ({}, ["120 iterations/s"]),
    ],
)
def test_a_server_shows_its_load_and_no_steps(scheduler, load):
    facts = ["ns/team", "replica a5fa77", "2 ranks", "2 more processes", *load, "vllm 0.32.0"]
    assert jobs.facts(JOB, engine(**scheduler)) == facts


def test_status_names_the_processes_of_a_server_and_what_is_not_seen():
    ranks = engine(idle=True, running=0, waiting=0)
    ranks[2] = replace(ranks[2], status="died")
    state = State(0.0, "0", "gpu-1", ranks=tuple(ranks), jobs=(JOB,))
    lines = "\n".join(_lines(state, (), True))
    assert "no latencies and prefix hits" in lines
    assert "rank 0: running, on gpu-1, median iteration 8 ms" in lines
    assert "scheduler 2: died, on gpu-1" in lines
    assert "front end 3: running" in lines
    assert lines.count("no iteration yet") == 0
    assert "step" not in lines


def test_a_run_of_a_server_has_iterations():
    run = RunSummary("ns/team", "chat", "r", 60.0, 0.0, steps=12, step_clock="iteration()")
    assert (run.counted_steps, run.a_step) == ("12 iterations", "an iteration")
