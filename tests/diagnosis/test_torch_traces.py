"""Traces that torch.profiler records now, of a gloo training on the CPU, get the right verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.verdict.conclusion import Diagnosis

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


def diagnosed(folder: Path) -> Diagnosis:
    return diagnose(sorted(folder.glob("rank*.json.gz")))


def test_a_slow_dataset_and_a_rank_that_sleeps_are_named(tmp_path: Path) -> None:
    trained(tmp_path, 2, "loader", "slow_rank")
    found = diagnosed(tmp_path / "loader")
    assert (found.verdict, len(found.measures)) == ("data_loading", 2)
    assert found.findings[0].share > 0.5
    found = diagnosed(tmp_path / "slow_rank")
    assert [(f.kind, f.rank) for f in found.findings] == [("straggler", 1)]


@pytest.mark.slow
def test_work_around_the_operators_is_host_bound_and_computing_is_healthy(tmp_path: Path) -> None:
    trained(tmp_path, 1, "host", "tiny_operators", "compute")
    for fault in ("host", "tiny_operators"):
        found = diagnosed(tmp_path / fault)
        assert found.verdict == "host_bound"
        assert found.findings[0].share > 0.3
    found = diagnosed(tmp_path / "compute")
    assert (found.verdict, found.findings) == ("healthy", ())


def recorded(folder: Path, *options: str) -> dict[str, str]:
    """By fault the verdict on its trace."""
    subprocess.run(
        [sys.executable, str(FAULTS_PROGRAM), str(folder), *options],
        check=True,
        capture_output=True,
        timeout=180,
    )
    return {p.name.partition("-")[0]: diagnose([p]).verdict for p in folder.iterdir()}


def test_a_checkpoint_and_a_loop_over_values_are_named(tmp_path: Path) -> None:
    faults = ("--faults", "checkpoint", "item")
    found = recorded(tmp_path, *faults, "--models", "perceptron", "--scale", "0.5")
    assert found == {"checkpoint": "checkpoint", "item": "sync_bound"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "model", "verdict", "options"),
    [
        ("garbage_collection", "convolutional", "gc_pause", ("--stacks",)),
        ("recompilation", "perceptron", "recompilation", ()),
    ],
)
def test_an_injected_fault_is_named(
    tmp_path: Path, fault: str, model: str, verdict: str, options: tuple[str, ...]
) -> None:
    found = recorded(tmp_path, "--faults", fault, "--models", model, *options)
    assert found == {fault: verdict}
