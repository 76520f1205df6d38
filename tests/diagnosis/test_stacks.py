"""Who waits for whom, from the stacks of the ranks of a hanging job."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from warpwatch.diagnosis.reader import TraceError
from warpwatch.diagnosis.stacks import diagnose_stacks

TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
OWN = {"file": "/home/me/train.py", "line": 41, "function": "wait_for_lock"}


def stack(folder: Path, rank: int, function: str | None) -> Path:
    """Rank's file; ``function``: the collective its main thread is in."""
    frames: list[dict[str, Any]] = [{"file": "/home/me/train.py", "line": 9, "function": "main"}]
    if function is None:
        frames.append(OWN)
    else:
        wrapper = TORCH.replace("distributed_c10d", "c10d_logger")
        frames.append({"file": wrapper, "line": 83, "function": "wrapper"})
        frames.append({"file": TORCH, "line": 2900, "function": function})
    helper = {"file": TORCH, "line": 1, "function": "all_gather"}
    threads = [
        {"name": "helper", "ident": 2, "main": False, "frames": [helper]},
        {"name": "MainThread", "ident": 1, "main": True, "frames": frames},
    ]
    content = {"rank": rank, "job": "demo", "time": 1.0, "via": "helper", "threads": threads}
    path = folder / f"rank{rank}.stacks.json"
    path.write_text(json.dumps(content))
    return path


def summary(folder: Path, functions: list[str | None], **options: Any) -> str:
    files = [stack(folder, rank, function) for rank, function in enumerate(functions)]
    return str(diagnose_stacks(files, **options)["summary"])


def test_the_diagnosis_of_stacks_has_the_form_of_every_diagnosis(tmp_path: Path) -> None:
    files = [stack(tmp_path, 1, "all_reduce"), stack(tmp_path, 0, None)]
    assert diagnose_stacks(files) == {
        "schema": 1,
        "traces": [],
        "findings": [],
        "verdict": "inconclusive",
        "summary": "rank 1 waits in all_reduce for rank 0",
    }


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ([None, "barrier", "barrier", "barrier"], "ranks 1-3 wait in barrier for rank 0"),
        (
            ["broadcast", None, "broadcast", None],
            "ranks 0 and 2 wait in broadcast for ranks 1 and 3",
        ),
        (
            [None, "all_reduce", "reduce_scatter_tensor"],
            "ranks 1-2 wait in all_reduce and reduce_scatter_tensor for rank 0",
        ),
        (
            [None, None],
            "no rank waits in a collective: rank 0 is in wait_for_lock (train.py:41), "
            "rank 1 is in wait_for_lock (train.py:41)",
        ),
        (
            ["all_reduce", "broadcast"],
            "ranks 0-1 wait in all_reduce and broadcast: they are in different collectives "
            "(rank 0 is in main (train.py:9), rank 1 is in main (train.py:9))",
        ),
    ],
)
def test_the_waiting_ranks_and_those_they_wait_for_are_named(
    tmp_path: Path, functions: list[str | None], said: str
) -> None:
    assert summary(tmp_path, functions) == said


def test_a_rank_without_a_stack_is_the_one_that_is_waited_for(tmp_path: Path) -> None:
    said = summary(tmp_path, ["all_reduce", "all_reduce"], missing=[2])
    assert said == "ranks 0-1 wait in all_reduce for rank 2, whose stack could not be read"


def test_a_damaged_file_counts_as_missing_and_alone_is_an_error(tmp_path: Path) -> None:
    damaged = tmp_path / "rank0.stacks.json"
    damaged.write_text('{"rank": 0, "thr')
    said = diagnose_stacks([damaged, stack(tmp_path, 1, "all_reduce")])["summary"]
    assert said == "rank 1 waits in all_reduce for rank 0, whose stack could not be read"
    with pytest.raises(TraceError, match="cut short"):
        diagnose_stacks([damaged])


@pytest.mark.parametrize(
    "content",
    [[], {"rank": "1"}, {"rank": 1}, {"rank": 1, "threads": [5, {"main": True, "frames": "x"}]}],
)
def test_json_that_is_no_stacks_file_is_an_error(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(content))
    with pytest.raises(TraceError):
        diagnose_stacks([path])
