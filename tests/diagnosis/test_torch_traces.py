"""Traces that torch.profiler records now, of trainings on the CPU, are read and diagnosed."""

import fcntl
import json
import subprocess
import sys
from pathlib import Path

import pytest

from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.measures.measures import measure
from warpwatch_diagnosis.trace.reader import read_trace

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]


def run(program: str, *arguments: object) -> None:
    command = [sys.executable, "-m", f"tests.diagnosis.{program}", *map(str, arguments)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "live-recordings"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            run("live_recordings", folder)
            (folder / "done").touch()
    return folder


@pytest.mark.parametrize(
    ("fault", "verdict", "rank"),
    [("no_workers", "data_loading", None), ("sleeping", "straggler", 1)],
)
def test_a_rank_that_waits_is_named_with_its_fault(recordings, fault, verdict, rank):
    found = diagnose(sorted(recordings.glob(f"{fault}.*")))
    assert found.verdict == verdict, found.summary
    assert len(found.measures) == 2
    assert rank is None or [f.rank for f in found.findings] == [rank]


def test_checkpoints_and_reads_of_values_are_seen(recordings):
    """Their shares of the step depend on what else the machine does; the fixtures have verdicts."""
    saving, reading = (
        diagnose([recordings / f"{n}.pt.trace.json.gz"]) for n in ("checkpoint", "item")
    )
    assert "checkpoint" in [finding.kind for finding in saving.findings], saving.summary
    reads = reading.measures[0].synchronization
    assert [count >= 800 for count in reads.per_step] == [True] * 4
    assert "aten::_local_scalar_dense" in [call.name for call in reads.calls]


@pytest.mark.parametrize("program", ["convolutional", "attention"])
def test_flops_are_those_of_torchs_flop_counter(recordings, program):
    counted = json.loads((recordings / "flops.json").read_text())[program]
    work = measure(read_trace(recordings / f"{program}.json")).operators.work
    assert sum(one.flops for one in work.values()) == counted > 0
    assert sum(one.model_flops for one in work.values()) == counted


@pytest.mark.loops
@pytest.mark.parametrize(
    ("fault", "verdict", "options"),
    [
        ("healthy", "healthy", ()),
        ("tiny_operators", "host_bound", ()),
        ("logging", "host_bound", ()),
        ("garbage_collection", "gc_pause", ("--stacks",)),
        ("recompilation", "recompilation", ()),
    ],
)
def test_each_fault_of_the_fixtures_is_named_in_a_new_recording(tmp_path, fault, verdict, options):
    run("recorded_faults", tmp_path, "--faults", fault, "--models", "perceptron", *options)
    assert [diagnose([path]).verdict for path in tmp_path.iterdir()] == [verdict]
