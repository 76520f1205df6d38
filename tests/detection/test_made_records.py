"""Changes that the engine makes of records, as golden files: cases that no stream of a job has."""

from typing import Any

import pytest

from tests.cases import cases
from tests.detection.streams import alone, detection, fed, made, restarted
from warpwatch_detection.anomalies import snapshot

STORIES = cases(__file__)


@pytest.mark.parametrize("name", STORIES)
def test_what_the_engine_makes_of_records(name, golden_report):
    story: dict[str, Any] = STORIES[name]
    kinds, sections = story.get("kinds", "").split(), story.get("config", {})
    engine = alone(*kinds, **sections) if kinds else detection(**sections)
    for one in made(story["records"]):
        if not isinstance(one, str):
            fed(engine, [one])
            continue
        what, _, now = one.partition(" ")
        if what == "restart":
            engine, _ = restarted(engine, float(now), **story.get("next", {}))
        elif what == "skip":
            engine.skip_to(float(now))
        elif what == "resolve":
            engine.resolve(engine.active[0].id, float(now), "uid 0")
    golden_report(engine)
    live = {(job, rank) for job, ranks in engine.state.ranks.jobs.items() for rank in ranks}
    cores = engine.state.register.cores
    assert {(job, rank) for job, ranks in cores.items() for rank in ranks} <= live
    if not live:
        parts = {name: part for name, part in engine.parts().items() if name != "engine"}
        assert b"llama" not in snapshot.save(parts)
