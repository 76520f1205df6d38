"""Real traces: the numbers and the verdicts that are known for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from warpwatch_diagnosis.diagnosis import diagnose

FOLDER = Path(__file__).parents[3] / "shared" / "evaluation" / "traces"
TOLERANCE = 0.02

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the evaluation traces are not here")

NAMES = [
    "resnet50_workers0.json.gz",
    "resnet50_workers4.json.gz",
    "nccl_a100.json.gz",
    "ddp_control.json.gz",
    "ddp_test.json.gz",
]


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_verdict_agree_with_the_reference(name: str) -> None:
    expected: dict[str, Any] = json.loads((FOLDER / "expected.json").read_text())[name]
    found = diagnose([FOLDER / name]).to_json()
    trace = found["traces"][0]
    wanted = {key: value for key, value in expected.items() if key in trace["time"]}
    assert len(wanted) == 8
    assert trace["time"] == pytest.approx(wanted, abs=TOLERANCE)
    assert trace["steps"] == expected["steps"]
    assert trace["window_s"] == pytest.approx(expected["window_ms"] / 1e3, rel=0.001)
    assert found["verdict"] == (expected["verdict"] or "healthy")


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("alexnet_v100.json.gz", "allocator_thrash"), ("amd_mi250.json.gz", "launch_bound")],
)
def test_traces_with_little_in_them_have_a_verdict_that_is_less_sure(
    name: str, verdict: str
) -> None:
    found = diagnose([FOLDER / name])
    assert (found.verdict, found.findings[0].confidence) == (verdict, "medium")
    assert "only" in found.findings[0].evidence[-1]


def test_who_waits_in_collectives_alone_hears_what_would_decide() -> None:
    found = diagnose([FOLDER / "cpu_only.json.gz"])
    assert found.verdict == "inconclusive"
    assert found.summary == (
        "rank 34: 85 % of the step waits in collectives; the other ranks' traces say why; "
        "likeliest: communication_bound (85 %) or straggler (85 %); the traces of all ranks of the "
        "same steps say who waits for whom"
    )
