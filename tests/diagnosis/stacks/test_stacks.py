"""Waiting and late ranks of a hanging job from their stacks, and lines that keep memory."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases as tables
from warpwatch_diagnosis.memory_growth import diagnose_memory
from warpwatch_diagnosis.stacks import diagnose_stacks
from warpwatch_diagnosis.trace.files import TraceError

TORCH = "/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py"
LIBRARY = "/usr/lib/python3.12/"
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
    others: Iterable[dict[str, Any]] = (),
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


# --- each situation: what is known of the ranks; the golden file has the diagnosis -----------

BARRIER, REDUCE = "barrier", "all_reduce"
STOPPED = "the process is stopped: no stacks"
CASES = tables(__file__)


def in_step(folder: Path, ranks: list[dict[str, Any]]) -> list[Path]:
    """Write the files of the ranks of a situation."""
    whole = [{"frames": (), **about} for about in ranks]
    return [place(folder, rank, STEP, *one.pop("frames"), **one) for rank, one in enumerate(whole)]


def behind(folder: Path, state: str, time: float) -> list[Path]:
    group = {"process_group": "0", "name": "nccl:all_reduce", "p2p": False}
    peer = group | {"sequence": 812, "state": state, "time": time}
    rank = group | {"sequence": 811, "state": "completed", "time": 899.0}
    return [
        place(folder, 0, STEP, time=1000.5, collectives=[peer]),
        place(folder, 1, STEP, time=1000.0, collectives=[rank]),
    ]


def damaged(folder: Path) -> Path:
    path = folder / "rank0.stacks.json"
    path.write_text('{"rank": 0, "thr')
    return path


def renamed(folder: Path) -> Path:
    path = stack(folder, 1, None)
    path.write_text(path.read_text().replace('"rank": 1', '"rank": 0'))
    return path


def test_each_situation_has_the_diagnosis_of_the_golden_file(tmp_path, golden):
    found = {}
    for name, (functions, missing) in CASES["ranks"].items():
        files = [stack(tmp_path, number, function) for number, function in enumerate(functions)]
        found[name] = diagnose_stacks(files, missing=missing)
    other = [damaged(tmp_path), stack(tmp_path, 1, REDUCE)]
    found["a damaged file counts as missing"] = diagnose_stacks(other)
    other = [stack(tmp_path, 0, REDUCE), renamed(tmp_path)]
    found["a file of another rank counts as missing"] = diagnose_stacks(other)
    for name, ranks in CASES["situations"].items():
        found[name] = diagnose_stacks(in_step(tmp_path, ranks))
    for name, seen in CASES["behind"].items():
        found[name] = diagnose_stacks(behind(tmp_path, *seen))
    paths = [stack(tmp_path, number, BARRIER) for number in range(2)]
    found["on nodes"] = diagnose_stacks(paths, {2: STOPPED}, {0: "", 1: "gpu-1", 2: "gpu-2"})
    backward = in_step(tmp_path, CASES["situations"]["backward alone"])
    found["backward probably waits"] = diagnose_stacks(backward, missing={1: STOPPED})
    slow = place(tmp_path, 2, STEP, (LIBRARY + "ssl.py", 9, "read"))
    paths = [stack(tmp_path, 0, REDUCE), slow]
    found["a slow front end"] = diagnose_stacks(paths, front_end=2)
    found["a front end without stacks"] = diagnose_stacks(paths, front_end=9)
    for name, ranks in CASES["memory"].items():
        files = [tmp_path / f"{number}.memory.json" for number in range(len(ranks))]
        for path, about in zip(files, ranks, strict=True):
            path.write_text(json.dumps(about))
        found[name] = diagnose_memory(files, {0: "gpu-0", 1: "gpu-1"})
    golden("diagnosis/stacks.json", json.dumps(found, indent=1).encode())


def test_what_is_no_stacks_file_is_an_error(tmp_path, cases):
    def said(content: str) -> str:
        path = tmp_path / "odd.json"
        path.write_text(content)
        with pytest.raises(TraceError) as caught:
            diagnose_stacks([path])
        return str(caught.value).replace(f"{tmp_path}/", "")

    cases("diagnosis/odd_stacks.txt", said)


def test_a_stacks_file_has_at_most_16_mebibytes(tmp_path):
    path = stack(tmp_path, 0, BARRIER)
    path.write_text(path.read_text().ljust(2**24))
    diagnose_stacks([path])
    path.write_text(path.read_text() + " ")
    with pytest.raises(TraceError, match=f"{path}: more than 16,777,216 bytes"):
        diagnose_stacks([path])


@pytest.mark.parametrize("line", ["1" + "0" * 400, "-1", "2147483648", "NaN", "null", '"5"'])
def test_a_line_that_cannot_be_one_is_line_zero(tmp_path, line):
    path = stack(tmp_path, 0, None)
    path.write_text(path.read_text().replace('"line": 41', f'"line": {line}'))
    said = diagnose_stacks([path])["summary"]
    assert said.endswith("rank 0 is in wait_for_lock (train.py:0)")
