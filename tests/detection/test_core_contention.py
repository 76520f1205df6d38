"""Evidence of why a slow rank had no core, beside the straggler and the regression it explains."""

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import pytest

from tests.cases import cases as tables
from tests.conftest import Cases
from tests.detection.life import LLAMA, Life
from tests.detection.streams import EPOCH_S, Extra, Job, detection, fed, on
from warpwatch_detection.anomalies.core_contention import forget, observe, users_text
from warpwatch_detection.anomalies.snapshot import Snapshot, restore, save
from warpwatch_detection.replay import LogReplay
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.log import decode, encode
from warpwatch_telemetry.records import RankEvent, Record

HOG: dict[str, Any] = {"pid": 4711, "cores": 0.95, "core": 5, "name": "make"}


Details = Mapping[int, Mapping[str, Any]]


def crowded(job: Job, count: int, details: Details, **steps: Extra) -> Iterator[Record]:
    looked = job.time
    for step in job.steps(count, **steps):
        yield step
        if step.rank == job.ranks - 1 and step.time >= looked + 2.0:
            looked = step.time
            for rank in range(job.ranks):
                yield RankEvent(step.time, "llama", rank, "process", details.get(rank, {}))


def shares(of_3: Mapping[str, Any] | None = None, **share: Any) -> dict[int, dict[str, Any]]:
    """The same for each of four ranks, but of rank 3."""
    alike: dict[int, dict[str, Any]] = {rank: dict(share) for rank in range(4)}
    return alike if of_3 is None else alike | {3: dict(of_3)}


def slow(ranks: int | None, *looks: Details, steps: int = 100) -> Iterator[Record]:
    """Healthy first, as the first look says; then these ranks compute longer."""
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    yield from job.seen()
    yield from crowded(job, 300, looks[0])
    for details in looks[1:]:
        yield from crowded(job, steps, details, compute=on(ranks, 0.2))


def found(records: Iterable[Record]) -> Anomaly:
    replay = LogReplay()
    list(replay.run(records))
    (anomaly,) = replay.anomalies.values()
    return anomaly


CALM = shares(core_wait_share=0.02)
NO_CORE: dict[str, Any] = {"core_wait_share": 0.38, "core_users": [HOG]}
STORIES = tables(__file__)
POLLS = STORIES.pop("polls")


@pytest.mark.parametrize("name", STORIES)
def test_the_evidence_is_what_the_looks_say(name: str) -> None:
    story = STORIES[name]
    ranks, evidence = story.get("ranks"), tuple(story["evidence"])
    looks = [shares(look.get("rank 3"), **look["all"]) for look in story["looks"]]
    anomaly = found(slow(ranks, *looks, steps=60))
    kind = "step_regression" if ranks is None else "straggler"
    assert (anomaly.kind, anomaly.rank) == (kind, ranks)
    assert anomaly.evidence == evidence
    assert anomaly.summary.endswith(f"; {evidence[0]}") if evidence else ";" not in anomaly.summary


@pytest.mark.parametrize("name", POLLS)
def test_the_evidence_is_of_recent_polls_of_ranks_that_live(name: str) -> None:
    life, evidence = Life(), []
    cores = life.register.state.cores
    for at, what, rank, *detail in POLLS[name]["rows"]:
        if what == "poll":
            event = RankEvent(EPOCH_S + at, "llama", rank, "process", *detail)
            observe(cores, event, life.rank_devices)
        elif what == "end":
            forget(cores, LLAMA, rank)
        elif what == "fine":
            life.fine("straggler", at)
        else:
            evidence += [list(one.evidence) for one in life.found("straggler", at, rank=rank)]
    assert evidence == POLLS[name]["evidence"]


def test_a_log_says_the_same_and_evidence_outlives_a_restart_of_the_daemon() -> None:
    records = list(slow(3, CALM, shares(NO_CORE, core_wait_share=0.02)))
    assert found(decode(encode(record)) for record in records) == found(records)
    engine, successor = detection(), detection()
    fed(engine, records)
    body = msgspec.msgpack.decode(save(engine.parts()), type=Snapshot)
    assert restore(body, successor.parts()) == set()
    assert successor.active == engine.active
    assert successor.active[0].evidence


def test_what_a_job_waited_while_it_began_is_soon_not_usual_any_more() -> None:
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    records = [*job.seen(), *crowded(job, 10, shares(core_wait_share=0.9))]
    records += crowded(job, 300, CALM)
    records += crowded(job, 100, shares(core_wait_share=0.3), compute=on(None, 0.2))
    assert found(records).evidence[0].endswith("waited 30 % of the time for a core (usually 5 %)")


def test_the_users_of_cores_in_words(cases: Cases) -> None:
    """Those of one name and core together, unnamed if of others; what makes no sense is ignored."""
    cases("detection/core_users.txt", lambda text: repr(users_text(json.loads(text))))
