"""What is counted while a trace streams by is what the diagnosis reads of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from warpwatch.diagnosis.inventory import take_inventory
from warpwatch.diagnosis.reader import read_trace

FOLDER = Path(__file__).parents[3] / "shared" / "evaluation" / "traces"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the evaluation traces are not here")


@pytest.mark.parametrize(
    ("name", "sees_gpu"),
    [("resnet50_workers4.json.gz", True), ("amd_mi250.json.gz", True), ("cpu_only.json.gz", False)],
)
def test_the_counts_of_real_traces_agree_with_what_diagnosis_reads(
    name: str, sees_gpu: bool
) -> None:
    found, trace = take_inventory(FOLDER / name), read_trace(FOLDER / name)
    events = trace.events
    assert found.counts["kernel"] == len(events["kernel"])
    # Old traces file annotations under operators, which the diagnosis tells apart by name.
    operators = found.counts["operator"] + found.counts["annotation"]
    assert operators == len(events["operator"]) + len(events["annotation"])
    assert sorted(found.steps) == sorted(
        {int(step.name.partition("#")[2]) for step in trace.named("ProfilerStep#")}
    )
    assert found.begin_us == min(e.begin_us for kept in events.values() for e in kept)
    assert found.end_us == max(e.end_us for kept in events.values() for e in kept)
    assert found.sees_gpu is sees_gpu
    assert (found.untimed, found.listed > operators) == (0, True)
