"""Real traces of GPUs: the numbers and the verdicts that are known for them."""

import json
from pathlib import Path

import pytest

from warpwatch_diagnosis.diagnosis import diagnose

FOLDER = Path(__file__).parents[3] / "shared" / "evaluation" / "traces"
TOLERANCE = 0.02
NAMES = ("resnet50_workers0", "resnet50_workers4", "nccl_a100", "ddp_control", "ddp_test")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the evaluation traces are not here")


@pytest.mark.parametrize("name", NAMES)
def test_numbers_and_verdict_agree_with_the_reference(name: str) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())[f"{name}.json.gz"]
    found = diagnose([FOLDER / f"{name}.json.gz"]).to_json()
    trace = found["traces"][0]
    wanted = {key: value for key, value in expected.items() if key in trace["time"]}
    assert len(wanted) == 8
    assert trace["time"] == pytest.approx(wanted, abs=TOLERANCE)
    assert trace["steps"] == expected["steps"]
    assert trace["window_s"] == pytest.approx(expected["window_ms"] / 1e3, rel=0.001)
    assert found["verdict"] == (expected["verdict"] or "healthy")


@pytest.mark.parametrize(
    ("name", "verdict"), [("alexnet_v100", "allocator_thrash"), ("amd_mi250", "launch_bound")]
)
def test_traces_with_little_in_them_have_a_less_sure_verdict(name: str, verdict: str) -> None:
    found = diagnose([FOLDER / f"{name}.json.gz"])
    assert (found.verdict, found.findings[0].confidence) == (verdict, "medium")
    assert "only" in found.findings[0].evidence[-1]
