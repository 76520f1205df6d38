"""Traces that torch.profiler records now, of a gloo training on the CPU, get the right verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.verdict.conclusion import Diagnosis

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

PROGRAM = Path(__file__).with_name("training.py")
FAULTS_PROGRAM = Path(__file__).with_name("recorded_faults.py")


def trained(folder: Path, world_size: int, *faults: str) -> None:
    """One training with each fault after the other; the traces lie in one folder a fault."""
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(rank), str(world_size), str(folder), *faults],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world_size)
    ]
    for rank in ranks:
        _, errors = rank.communicate(timeout=90)
        assert rank.returncode == 0, errors


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two_ranks")
    trained(folder, 2, "loader", "host", "tiny_operators", "slow_rank")
    return folder


def diagnosed(folder: Path) -> Diagnosis:
    return diagnose(sorted(folder.glob("rank*.json.gz")))


def test_a_dataset_that_sleeps_is_data_loading(two_ranks: Path) -> None:
    found = diagnosed(two_ranks / "loader")
    assert (found.verdict, len(found.measures)) == ("data_loading", 2)
    assert found.findings[0].share > 0.5


@pytest.mark.parametrize("fault", ["host", "tiny_operators"])
def test_work_of_the_loop_around_the_operators_is_host_bound(two_ranks: Path, fault: str) -> None:
    found = diagnosed(two_ranks / fault)
    assert found.verdict == "host_bound"
    assert found.findings[0].share > 0.3


def test_a_rank_that_sleeps_alone_is_the_straggler(two_ranks: Path) -> None:
    found = diagnosed(two_ranks / "slow_rank")
    assert [(f.kind, f.rank) for f in found.findings] == [("straggler", 1)]


def test_a_loop_that_computes_is_healthy(tmp_path: Path) -> None:
    trained(tmp_path, 1, "compute")
    found = diagnosed(tmp_path / "compute")
    assert (found.verdict, found.findings) == ("healthy", ())


def recorded(folder: Path, *options: str) -> None:
    subprocess.run(
        [sys.executable, str(FAULTS_PROGRAM), str(folder), *options],
        check=True,
        capture_output=True,
        timeout=180,
    )


@pytest.mark.parametrize(
    ("fault", "model", "verdict", "options"),
    [
        ("checkpoint", "perceptron", "checkpoint", ()),
        ("garbage_collection", "convolutional", "gc_pause", ("--stacks",)),
        ("item", "transformer", "sync_bound", ("--scale", "0.5")),
        ("recompilation", "perceptron", "recompilation", ()),
    ],
)
def test_an_injected_fault_is_named(
    tmp_path: Path, fault: str, model: str, verdict: str, options: tuple[str, ...]
) -> None:
    recorded(tmp_path, "--faults", fault, "--models", model, *options)
    assert diagnose(list(tmp_path.iterdir())).verdict == verdict
