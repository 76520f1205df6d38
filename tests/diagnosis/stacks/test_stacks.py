"""Who waits for whom, from the stacks of the ranks of a hanging job."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from warpwatch_diagnosis.stacks.waiting import diagnose_stacks
from warpwatch_diagnosis.trace.errors import TraceError

TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
LIBRARY = "/usr/lib/python3.12/"
PACKAGES = LIBRARY + "site-packages/"
STEP = ("/home/me/train.py", 41, "step")
# File, line, function.
Frame = tuple[str, int, str]


def framed(frames: Iterable[Frame], calls: str | None = None) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [{"file": f, "line": n, "function": w} for f, n, w in frames]
    if calls:
        found[-1]["calls"] = calls
    return found


def place(
    folder: Path,
    rank: int,
    *frames: Frame,
    calls: str | None = None,
    others: tuple[dict[str, Any], ...] = (),
    **more: Any,
) -> Path:
    """Rank's file with these frames of its main thread, innermost last."""
    thread = {"name": "MainThread", "ident": 1, "main": True, "frames": framed(frames, calls)}
    content = {"rank": rank, "job": "demo", "time": 1.0, "via": "helper", **more}
    path = folder / f"rank{rank}.stacks.json"
    path.write_text(json.dumps({**content, "threads": [*others, thread]}))
    return path


def stack(folder: Path, rank: int, function: str | None) -> Path:
    """Rank's file; ``function``: the collective its main thread is in."""
    frames: list[Frame] = [("/home/me/train.py", 9, "main")]
    if function is None:
        frames.append(("/home/me/train.py", 41, "wait_for_lock"))
    else:
        wrapper = TORCH.replace("distributed_c10d", "c10d_logger")
        frames += [(wrapper, 83, "wrapper"), (TORCH, 2900, function)]
    helper = {"name": "helper", "main": False, "frames": framed([(TORCH, 1, "all_gather")])}
    return place(folder, rank, *frames, others=(helper,))


def test_the_diagnosis_of_stacks_has_the_form_of_every_diagnosis(tmp_path: Path) -> None:
    files = [stack(tmp_path, 1, "all_reduce"), stack(tmp_path, 0, None)]
    sentence = "rank 1 waits in all_reduce for rank 0"
    found = diagnose_stacks(files)
    (finding,) = found.pop("findings")
    assert found == {"schema": 1, "traces": [], "verdict": "late_rank", "summary": sentence}
    assert finding.pop("advice").startswith("Look at what the named rank does")
    assert finding == {
        "kind": "late_rank", "rank": 0, "share": None, "recoverable_s": None,
        "confidence": "high", "evidence": [sentence],
    }  # fmt: skip


BARRIER, REDUCE, STOPPED = "barrier", "all_reduce", "the process is stopped"


@pytest.mark.parametrize(
    ("functions", "missing", "kind", "rank", "said"),
    [
        (
            [None, BARRIER, BARRIER, BARRIER], {},
            "late_rank", 0, "ranks 1-3 wait in barrier for rank 0",
        ),
        (
            ["broadcast", None, "broadcast", None], {},
            "late_rank", None, "ranks 0 and 2 wait in broadcast for ranks 1 and 3",
        ),
        (
            [None, REDUCE, "reduce_scatter_tensor"], {},
            "late_rank", 0, "ranks 1-2 wait in all_reduce and reduce_scatter_tensor for rank 0",
        ),
        (
            [None, None], {}, "no_rank_waits", None,
            "no rank waits in a collective: rank 0 is in wait_for_lock (train.py:41), "
            "rank 1 is in wait_for_lock (train.py:41)",
        ),
        (
            [REDUCE, "broadcast"], {}, "mismatched_collectives", None,
            "ranks 0-1 wait in all_reduce and broadcast: they are in different collectives "
            "(rank 0 is in main (train.py:9), rank 1 is in main (train.py:9))",
        ),
        (
            [BARRIER, BARRIER], {}, "stuck_collective", None,
            "ranks 0-1 wait in barrier and none is missing: the collective itself hangs, or a rank "
            "is elsewhere",
        ),
        (
            [REDUCE, REDUCE], {2: "no answer"}, "late_rank", 2,
            "ranks 0-1 wait in all_reduce for rank 2, whose stack could not be read",
        ),
        (
            [REDUCE], {1: f"{STOPPED}: no stacks"},
            "stopped_rank", 1, "rank 0 waits in all_reduce for rank 1, which is stopped",
        ),
        (
            [REDUCE], {1: "the process died while it was asked"},
            "stopped_rank", 1, "rank 0 waits in all_reduce for rank 1, which is dead",
        ),
        (
            [BARRIER, BARRIER, None], {3: "the process died"}, "stopped_rank", 3,
            "ranks 0-1 wait in barrier for rank 2 and for rank 3, which is dead",
        ),
        (
            [REDUCE], {1: STOPPED, 2: STOPPED, 3: "no answer"}, "stopped_rank", None,
            "rank 0 waits in all_reduce for ranks 1-2, which are stopped; the stack of rank 3 "
            "could not be read",
        ),
    ],
)  # fmt: skip
def test_the_waiting_ranks_and_those_they_wait_for_are_named(
    tmp_path: Path,
    functions: list[str | None],
    missing: dict[int, str],
    kind: str,
    rank: int | None,
    said: str,
) -> None:
    files = [stack(tmp_path, number, function) for number, function in enumerate(functions)]
    found = diagnose_stacks(files, missing=missing)
    assert found["summary"] == said
    assert found["verdict"] == found["findings"][0]["kind"] == kind
    assert found["findings"][0]["rank"] == rank


def test_ranks_are_named_with_their_nodes(tmp_path: Path) -> None:
    files = [stack(tmp_path, number, "barrier") for number in range(2)]
    found = diagnose_stacks(files, {2: STOPPED}, {1: "gpu-1", 2: "gpu-2"})
    said = "ranks 0-1 wait in barrier for rank 2 on gpu-2, which is stopped"
    assert found["summary"] == found["findings"][0]["evidence"][0] == said
    assert found["findings"][0]["node"] == "gpu-2"


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


def test_a_file_that_says_it_is_another_ranks_counts_as_missing(tmp_path: Path) -> None:
    zero = stack(tmp_path, 0, "all_reduce")
    one = stack(tmp_path, 1, None)
    one.write_text(one.read_text().replace('"rank": 1', '"rank": 0'))
    said = diagnose_stacks([zero, one])["summary"]
    assert said == "rank 0 waits in all_reduce for rank 1, whose stack could not be read"


@pytest.mark.parametrize("line", ["1" + "0" * 400, "-1", "2147483648", "NaN", "null", '"5"'])
def test_a_line_that_cannot_be_one_is_line_zero(tmp_path: Path, line: str) -> None:
    path = stack(tmp_path, 0, None)
    path.write_text(path.read_text().replace('"line": 41', f'"line": {line}'))
    said = diagnose_stacks([path])["summary"]
    assert said.endswith("rank 0 is in wait_for_lock (train.py:0)")


@pytest.mark.parametrize(
    ("frames", "calls", "said"),
    [
        ((STEP,), "acquire", "waits for a lock in step (train.py:41)"),
        ((STEP,), "__enter__", "waits for a lock in step (train.py:41)"),
        (
            (STEP, (LIBRARY + "queue.py", 171, "get"), (LIBRARY + "threading.py", 355, "wait")),
            "acquire",
            "waits for a queue in step (train.py:41)",
        ),
        (
            (STEP, (LIBRARY + "threading.py", 1147, "join")),
            None,
            "waits for a thread to end in step (train.py:41)",
        ),
        (
            (
                STEP,
                (PACKAGES + "torch/utils/data/dataloader.py", 1275, "_get_data"),
                (LIBRARY + "queue.py", 171, "get"),
            ),
            None,
            "waits for its data in step (train.py:41)",
        ),
    ],
)
def test_a_rank_alone_says_what_it_waits_for(
    tmp_path: Path, frames: tuple[Frame, ...], calls: str | None, said: str
) -> None:
    path = place(tmp_path, 0, *frames, calls=calls)
    assert diagnose_stacks([path])["summary"] == f"rank 0 {said}"


SAVE = framed([("/home/me/save.py", 7, "save")], "acquire")
HOLDER = {"name": "writer", "gil": True, "frames": framed([("/me/save.py", 7, "save")])}
HOLDS = {"silent_reason": "holds the GIL"}


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (
            {"calls": "acquire", "others": ({"name": "writer", "frames": SAVE},)},
            "waits for a lock in step (train.py:41), as does thread writer in save (save.py:7)",
        ),
        (
            HOLDS | {"others": (HOLDER,)},
            "is inside a C call of thread writer in save (save.py:7) that holds the GIL",
        ),
        (HOLDS, "is inside a C call in step (train.py:41) that holds the GIL"),
    ],
)
def test_another_thread_that_matters_is_named(
    tmp_path: Path, rank: dict[str, Any], said: str
) -> None:
    assert diagnose_stacks([place(tmp_path, 0, STEP, **rank)])["summary"] == f"rank 0 {said}"


def test_a_rank_that_is_stopped_within_a_collective_waits_for_no_one(tmp_path: Path) -> None:
    inside = (STEP, (TORCH, 2900, "all_reduce"))
    files = [
        place(tmp_path, 0, *inside),
        place(tmp_path, 1, *inside, silent_reason="stopped"),
        place(tmp_path, 2, STEP, calls="acquire"),
    ]
    assert diagnose_stacks(files)["summary"] == (
        "rank 0 waits in all_reduce for rank 1, which is stopped in step (train.py:41) "
        "and for rank 2, which waits for a lock in step (train.py:41)"
    )


def test_backward_is_said_to_wait_only_probably(tmp_path: Path) -> None:
    backward = (
        (PACKAGES + "torch/_tensor.py", 600, "backward"),
        (PACKAGES + "torch/autograd/graph.py", 823, "_engine_run_backward"),
    )
    path = place(tmp_path, 0, STEP, *backward)
    said = diagnose_stacks([path], missing={1: STOPPED})["summary"]
    assert said == (
        "rank 0 is in backward, where ranks wait for each other's gradients: "
        "probably for rank 1, which is stopped"
    )
    assert diagnose_stacks([path])["summary"] == (
        "no rank waits in a collective: rank 0 is in step (train.py:41)"
    )


def test_sequence_numbers_tell_who_never_entered_the_collective(tmp_path: Path) -> None:
    def entries(*numbers: int) -> list[dict[str, Any]]:
        name = "nccl:all_reduce"
        return [{"process_group": "0", "sequence": n, "name": name, "p2p": False} for n in numbers]

    p2p = [{"process_group": "0", "sequence": 9000, "name": "nccl:send", "p2p": True}]
    files = [
        place(tmp_path, 0, STEP, collectives=entries(811, 812, 813)),
        place(tmp_path, 1, STEP, collectives=entries(811) + p2p),
        place(tmp_path, 2, STEP, collectives=entries(813)),
    ]
    said = diagnose_stacks(files)["summary"]
    assert said.endswith("; rank 1 never entered all_reduce #812")
    same = [place(tmp_path, rank, STEP, collectives=entries(811)) for rank in (0, 1)]
    assert "never" not in diagnose_stacks(same)["summary"]
    odd = place(tmp_path, 2, STEP, collectives=[5, {"sequence": "x"}, {"sequence": 3}])
    assert "rank 2" in diagnose_stacks([odd])["summary"]


@pytest.mark.parametrize(
    ("state", "entered", "said"),
    [
        ("started", 900.0, "; rank 1 never entered all_reduce #812"),
        # Of a job that goes on: rank 1 was looked at before its peer had come so far, or a moment
        # after, or the collective is over.
        ("started", 1000.2, ""),
        ("started", 999.9, ""),
        ("completed", 900.0, ""),
    ],
)
def test_a_rank_is_behind_if_a_peer_waits(
    tmp_path: Path, state: str, entered: float, said: str
) -> None:
    def recorded(number: int, state: str, time: float) -> dict[str, Any]:
        about = {"process_group": "0", "name": "nccl:all_reduce", "p2p": False}
        return about | {"sequence": number, "state": state, "time": time}

    peer = place(tmp_path, 0, STEP, time=1000.5, collectives=[recorded(812, state, entered)])
    rank = place(tmp_path, 1, STEP, time=1000.0, collectives=[recorded(811, "completed", 899.0)])
    assert diagnose_stacks([peer, rank])["summary"].partition(";")[2] == said[1:]
