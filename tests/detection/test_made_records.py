"""Changes that the engine makes of records, as golden files: cases that no stream of a job has."""

from collections.abc import Iterable
from typing import Any

import pytest

from tests.cases import cases
from tests.detection.conftest import statuses_of
from tests.detection.streams import EPOCH_S, alone, changes_of, detection, made, restarted
from tests.golden_lines import line
from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.anomalies.register import Change

STORIES = cases(__file__)


def tell(told: list[str], time: float, changes: Iterable[Change]) -> None:
    """Add a line for each change; only the last one of updates in a row."""
    for change in changes:
        if change.what == "updated" and told and " updated " in told[-1]:
            told.pop()
        one = change.anomaly
        about = f"{change.what} {one.id} {one.severity}, rank {one.rank}, {one.summary}"
        told.append(f"{time - EPOCH_S:g} s {about}\n")


@pytest.mark.parametrize("name", STORIES)
def test_what_the_engine_makes_of_records(name, golden_report):
    story: dict[str, Any] = STORIES[name]
    kinds, sections = story.get("kinds", "").split(), story.get("config", {})
    engine = alone(*kinds, **sections) if kinds else detection(**sections)
    told: list[str] = []
    before: list[str] = []
    for one in made(story["records"]):
        if not isinstance(one, str):
            tell(told, one.time, changes_of(engine, [one]))
            continue
        what, _, now = one.partition(" ")
        if what == "row":
            # The statuses that differ from those after the row before.
            known, before = before, statuses_of(engine)
            told += [status for status in before if status not in known]
            told += [f"{len(before)} are left\n"] if len(before) < len(known) else []
        elif what == "restart":
            engine, closed = restarted(engine, float(now), **story.get("next", {}))
            told += [line("closed", one) for one in closed]
        elif what == "skip":
            engine.skip_to(float(now))
        elif what == "resolve":
            resolved = engine.active[0].id
            tell(told, float(now), engine.resolve(resolved, float(now), "uid 0"))
    golden_report(engine, told=told)
    live = {(job, rank) for job, ranks in engine.state.ranks.jobs.items() for rank in ranks}
    cores = engine.state.register.cores
    assert {(job, rank) for job, ranks in cores.items() for rank in ranks} <= live
    if not live:
        parts = {name: part for name, part in engine.parts().items() if name != "engine"}
        assert b"llama" not in snapshot.save(parts)
        used = ("hang", "memory_leak", "memory_pressure")
        assert b"GPU-" not in snapshot.save({one: parts[one] for one in used if one in parts})
