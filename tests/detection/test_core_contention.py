"""Evidence of why a slow rank had no core, beside the straggler and the regression it explains."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import pytest

from tests.detection.streams import Job, detection
from warpwatch_detection.anomalies.core_contention import users_text
from warpwatch_detection.anomalies.snapshot import Snapshot, give_back, take
from warpwatch_detection.replay import Replay
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.log import decode, encode
from warpwatch_telemetry.records import RankEvent, Record

HOG = {"pid": 4711, "cores": 0.95, "core": 5, "name": "make"}


def crowded(
    job: Job, count: int, details: Mapping[int, Mapping[str, Any]], **steps: Any
) -> Iterator[Record]:
    """Steps with a look at each rank every two seconds."""
    looked = job.time
    for step in job.steps(count, **steps):
        yield step
        if step.rank == job.ranks - 1 and step.time >= looked + 2.0:
            looked = step.time
            for rank in range(job.ranks):
                yield RankEvent(step.time, "llama", rank, "process", details.get(rank, {}))


def shares(**share: Any) -> dict[int, dict[str, Any]]:
    """The same for each of four ranks."""
    return {rank: dict(share) for rank in range(4)}


def found(records: Iterable[Record]) -> list[Anomaly]:
    replay = Replay()
    for _ in replay.run(records):
        pass
    return list(replay.anomalies.values())


def slow_rank(details: Mapping[int, Mapping[str, Any]]) -> Iterator[Record]:
    """Healthy first; then rank 3 of four computes longer, and the looks say so."""
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    yield from job.seen()
    yield from crowded(job, 500, shares(core_wait_share=0.02))
    yield from crowded(job, 100, details, compute=lambda _, rank: 0.2 if rank == 3 else 0.0)


def slow_job(details: Mapping[int, Mapping[str, Any]], usual: float = 0.02) -> Iterator[Record]:
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    yield from job.seen()
    yield from crowded(job, 500, shares(core_wait_share=usual, throttled_share=usual))
    yield from crowded(job, 100, details, compute=lambda *_: 0.2)


def test_a_slow_rank_that_waits_for_its_core_says_so_and_who_has_it() -> None:
    details = shares(core_wait_share=0.02)
    details[3] = {"core_wait_share": 0.38, "core_users": [HOG]}
    (straggler,) = found(slow_rank(details))
    said = (
        "rank 3 waited 38 % of the time for a core (its peers 2 %), "
        "while make (pid 4711) used 95 % of core 5"
    )
    assert (straggler.kind, straggler.rank) == ("straggler", 3)
    assert straggler.evidence == (said,)
    assert straggler.summary.endswith(f"; {said}")


def test_a_log_of_it_says_the_same() -> None:
    details = shares(core_wait_share=0.02)
    details[3] = {"core_wait_share": 0.38, "core_users": [HOG]}
    records = list(slow_rank(details))
    assert found(decode(encode(record)) for record in records) == found(records)


def test_what_all_ranks_wait_alike_is_no_evidence_against_one() -> None:
    (straggler,) = found(slow_rank(shares(core_wait_share=0.38, steal_share=0.2)))
    assert straggler.evidence == ()
    assert ";" not in straggler.summary


def test_a_slow_job_is_compared_with_what_was_usual() -> None:
    details = shares(core_wait_share=0.30)
    details[2] = {"core_wait_share": 0.41}
    (regression,) = found(slow_job(details))
    assert regression.kind == "step_regression"
    assert regression.evidence == ("rank 2 waited 41 % of the time for a core (usually 2 %)",)


def test_what_was_always_so_is_no_evidence() -> None:
    (regression,) = found(slow_job(shares(core_wait_share=0.4), usual=0.4))
    assert regression.evidence == ()


def test_what_a_job_waited_while_it_began_is_soon_not_usual_any_more() -> None:
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    records = [*job.seen(), *crowded(job, 10, shares(core_wait_share=0.9))]
    records += crowded(job, 300, shares(core_wait_share=0.02))
    records += crowded(job, 100, shares(core_wait_share=0.3), compute=lambda *_: 0.2)
    (regression,) = found(records)
    assert regression.evidence[0].endswith("waited 30 % of the time for a core (usually 5 %)")


def test_a_limit_that_is_reached_is_said_instead_of_the_wait_that_it_makes() -> None:
    details = shares(core_wait_share=0.8, throttled_share=0.9, core_limit=2.0)
    for detail in details.values():
        detail["core_users"] = [HOG]
    (regression,) = found(slow_job(details))
    said = "rank 0 reached its CPU limit of 2 cores in 90 % of the periods (usually 2 %)"
    assert regression.evidence == (said,)


def test_a_limit_that_is_known_later_takes_the_place_of_who_used_the_cores() -> None:
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    waits = shares(core_wait_share=0.8, core_users=[HOG])
    limited = shares(core_wait_share=0.8, throttled_share=0.9)
    records = [*job.seen(), *crowded(job, 500, shares(core_wait_share=0.02, throttled_share=0.0))]
    records += crowded(job, 100, waits, compute=lambda *_: 0.2)
    records += crowded(job, 100, limited, compute=lambda *_: 0.2)
    (regression,) = found(records)
    said = "rank 0 reached its CPU limit in 90 % of the periods (usually 0 %)"
    assert regression.evidence == (said,)


def test_what_the_hypervisor_takes_is_said() -> None:
    details = shares(core_wait_share=0.02)
    details[3] = {"core_wait_share": 0.02, "steal_share": 0.25}
    details[0]["steal_share"] = 0.01
    (straggler,) = found(slow_rank(details))
    said = "the hypervisor kept the cores of rank 3 for 25 % of the time (its peers 1 %)"
    assert straggler.evidence == (said,)


def test_who_used_the_core_before_it_got_crowded_is_not_to_blame() -> None:
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    details = shares(core_wait_share=0.02)
    calm = details | {3: {"core_wait_share": 0.1, "core_users": [HOG]}}
    details[3] = {"core_wait_share": 0.38}
    records = [*job.seen(), *crowded(job, 500, calm), *crowded(job, 60, details, compute=slow_3)]
    (straggler,) = found(records)
    assert straggler.evidence == ("rank 3 waited 38 % of the time for a core (its peers 2 %)",)


def test_evidence_stays_when_the_contention_is_over_before_the_anomaly() -> None:
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    details = shares(core_wait_share=0.02)
    details[3] = {"core_wait_share": 0.38, "core_users": [HOG]}
    records = [*job.seen(), *crowded(job, 500, {}), *crowded(job, 60, details, compute=slow_3)]
    records += crowded(job, 60, shares(core_wait_share=0.02), compute=slow_3)
    (straggler,) = found(records)
    assert "while make (pid 4711)" in straggler.summary


def slow_3(step: int, rank: int) -> float:
    return 0.2 if rank == 3 else 0.0


def test_evidence_outlives_a_restart_of_the_daemon() -> None:
    details = shares(core_wait_share=0.02)
    details[3] = {"core_wait_share": 0.38, "core_users": [HOG]}
    engine, successor = detection(), detection()
    for record in slow_rank(details):
        engine.feed(record)
    body = msgspec.msgpack.decode(take(engine.parts()), type=Snapshot)
    assert give_back(body, successor.parts()) == set()
    assert successor.active == engine.active
    assert successor.active[0].evidence


def test_users_alike_are_told_together_and_others_stay_unnamed() -> None:
    users = [HOG, HOG | {"pid": 4712, "cores": 0.02}, {"pid": 9, "cores": 3.25}]
    assert users_text(users) == (
        "make (pid 4711, 4712) used 97 % of core 5, another owner's process (pid 9) used 3.2 cores"
    )
    half = {"cores": 0.5}
    workers = [half | {"pid": 5, "rank": 2, "name": "python"}, half | {"pid": 6, "rank": 1}]
    assert users_text(workers) == (
        "python of rank 2 (pid 5) used 50 % of a core, rank 1 (pid 6) used 50 % of a core"
    )


@pytest.mark.parametrize(
    "users",
    [[1, "x", None], [{"pid": "1", "cores": 1}], [{"pid": 1, "cores": float("nan")}], [{"pid": 1}]],
)
def test_what_makes_no_sense_in_a_log_is_left_out(users: list[Any]) -> None:
    assert users_text(users) == ""


def test_a_name_cannot_break_the_line() -> None:
    name = "a\nb\u202ec" + "x" * 100
    assert users_text([{"pid": 1, "cores": 0.5, "name": name}]) == (
        "a?b?cxxxxxxxxxxx (pid 1) used 50 % of a core"
    )
