"""Real traces of two ranks over gloo with one fault each, or none, get the right verdict and rank.

The fixtures are recorded by ``python -m tests.diagnosis.recorded_faults --ranks --reduced 4``.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from tests.diagnosis.recorded_ranks import CULPRIT
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.verdict.corroboration import Asked

FIXTURES = Path(__file__).with_name("fixtures") / "ranks"
EXPECTED = {
    "healthy": ("healthy", None),
    "more_work": ("straggler", CULPRIT),
    "shared_core": ("straggler", CULPRIT),
    "slow_network": ("communication_bound", None),
}


def jobs() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(FIXTURES.glob("*.gz")):
        found[path.name.partition(".rank")[0]].append(path)
    return found


@pytest.mark.parametrize(("name", "paths"), jobs().items())
def test_the_fault_is_named_and_the_rank_that_has_it(name: str, paths: list[Path]) -> None:
    verdict, culprit = EXPECTED[name.partition("-")[0]]
    found = diagnose(paths)
    assert found.verdict == verdict, found.summary
    if culprit is not None:
        assert found.findings[0].rank == culprit


@pytest.mark.parametrize("model", ["perceptron", "convolutional"])
def test_a_core_that_is_shared_is_surer_with_the_anomaly_that_asked(model: str) -> None:
    paths = jobs()[f"shared_core-{model}"]
    alone = diagnose(paths).findings[0]
    finding = diagnose(paths, asked=Asked("straggler", rank=CULPRIT)).findings[0]
    assert (finding.kind, finding.rank) == ("straggler", CULPRIT)
    assert (alone.confidence, finding.confidence) == ("low", "medium")
