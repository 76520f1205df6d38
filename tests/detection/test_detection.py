"""The engine: records through detectors, joined steps, and replay of logs."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from tests.cases import cases
from tests.detection.life import LLAMA
from tests.detection.streams import EPOCH_S, Job, detection, joined, made, opened
from tests.golden_lines import line
from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.anomalies.explanation import DEVICE_CAUSES, EXPLAINED_BY, JOB_CAUSES
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import SHARES, SHARES_OF_SERVERS
from warpwatch_detection.detectors import DETECTORS
from warpwatch_detection.ranks import LiveRank, RankDevices
from warpwatch_telemetry.anomalies import DEVICE_KINDS, JOB_KINDS, KINDS
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Record, Step


def test_every_kind_has_a_detector_and_causes_are_kinds():
    assert DETECTORS.keys() == set(KINDS)
    for causes, effects, reasons in (
        (DEVICE_CAUSES, JOB_KINDS, DEVICE_KINDS),
        (JOB_CAUSES, DEVICE_KINDS, JOB_KINDS),
    ):
        assert set(causes) <= set(effects)
        assert {reason for group in causes.values() for reason in group} <= set(reasons)
    config = (DetectionConfig(), AnomaliesConfig(), RankDevices())
    assert [make(*config).kind for make in DETECTORS.values()] == list(DETECTORS)
    # The budget of false alarms is that of all kinds that have a share of it.
    strict = (DetectionConfig(false_alarms_per_job_day=0.001), *config[1:])
    made = [
        {
            k: [vars(make(*c))[k] for c in (config, strict)]
            for k in vars(make(*config))
            if "rate" in k
        }
        for make in DETECTORS.values()
    ]
    assert {
        kind for kind, rates in zip(DETECTORS, made, strict=True) if rates
    } == SHARES.keys() | SHARES_OF_SERVERS.keys()
    assert all(usual == pytest.approx(500 * low) for rates in made for usual, low in rates.values())


@pytest.mark.parametrize("budget", [0, 100.1])
def test_a_budget_without_false_alarms_or_with_very_many_is_refused(budget):
    with pytest.raises(ValidationError, match="false_alarms_per_job_day"):
        DetectionConfig(false_alarms_per_job_day=budget)


def test_a_cause_judges_before_what_it_explains():
    order = list(DETECTORS)
    for kind, causes in (*EXPLAINED_BY.items(), *DEVICE_CAUSES.items()):
        # If each may cause the other, the first that is found is the cause.
        alone = [cause for cause in causes if kind not in EXPLAINED_BY.get(cause, ())]
        assert [c for c in alone if order.index(c) > order.index(kind)] == [], kind


def test_of_more_jobs_than_the_bound_those_that_live_stay():
    engine = detection()
    for step in range(3):
        for number in range(306):
            engine.feed(Step(EPOCH_S + step, f"job-{number:03}", 0, step, 0.1))
    assert engine.refused == {"anomalies": 0, "jobs": 50}
    remembered = snapshot.save(engine.parts())
    assert b"job-000" in remembered
    assert b"job-255" in remembered
    assert b"job-256" not in remembered


def test_a_job_that_was_silent_for_long_makes_room_for_another():
    engine = detection()
    for number in range(256):
        engine.feed(Step(EPOCH_S + (number not in (3, 7)), f"job-{number:03}", 0, 0, 0.1))
    # A process that is seen has not been silent.
    engine.feed(RankSeen(EPOCH_S + 1, "job-003", 0))
    # Another rank of a job takes no place of one.
    engine.feed(Step(EPOCH_S + 599.8, "job-008", 1, 0, 0.1))
    engine.feed(Step(EPOCH_S + 599.9, "job-early", 0, 0, 0.1))
    engine.feed(Step(EPOCH_S + 600, "job-new", 0, 0, 0.1))
    assert engine.refused == {"anomalies": 0, "jobs": 2}
    remembered = snapshot.save(engine.parts())
    assert b"job-007" not in remembered and b"job-early" not in remembered
    assert b"job-new" in remembered and b"job-003" in remembered
    assert len(engine.state.ranks.jobs[Step(0.0, "job-008", 0, 0, 0.1).job_id]) == 2


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"ns/old": 1, "uid/7": 255}, {"ns/old": 1, "uid/7": 252, "ns/team": 3}),
        # With one more it would have as many as the other has.
        ({"ns/team": 127, "ns/old": 1, "uid/7": 128}, {"ns/team": 127, "ns/old": 1, "uid/7": 128}),
    ],
)
def test_an_owner_with_many_jobs_leaves_room_for_those_of_others(before, after):
    engine, names = detection(), (f"job-{number}" for number in range(1000))
    for now, owner in enumerate(Counter(before).elements()):
        engine.feed(Step(EPOCH_S + now, next(names), 0, 1, 1.0, owner=owner))
    for now in range(256, 259):
        engine.feed(Step(EPOCH_S + now, next(names), 0, 1, 1.0, owner="ns/team"))
    assert Counter(job.owner for job in engine.state.ranks.jobs) == after
    assert engine.refused["jobs"] == 3


def test_the_device_of_a_departed_rank_is_known_for_ten_minutes() -> None:
    rank_devices = RankDevices()
    for number, after_s in enumerate((0, 600, 601)):
        rank_devices.jobs[LLAMA] = {number: LiveRank(device="GPU-0")}
        rank_devices.leave(End(EPOCH_S + after_s, "llama", number))
    assert [rank_devices.device(LLAMA, number) for number in range(3)] == [None, "GPU-0", "GPU-0"]


def test_a_forgotten_job_takes_its_anomalies_with_it():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    opened(engine, job.steps(60, compute=lambda _, rank: 0.2 if rank == 1 else 0.0))
    assert [a.kind for a in engine.active] == ["straggler"]
    engine.feed(RankEvent(job.time, "llama", 1, "process", {"core_wait_share": 0.1}))
    for number in range(256):
        engine.feed(Step(job.time + 600, f"job-{number}", 0, 0, 0.1))
    assert [a.kind for a in engine.active if a.job == "llama"] == []
    assert engine.state.register.cores == {}


def ranks_step(rank: int, step: int, profiled: bool = False, **phases: float) -> Step:
    time = EPOCH_S + step + rank / 10
    return Step(time, "llama", rank, step, 1.0, phases_s=phases, profiled=profiled)


def two_ranks(rows: list[Any]) -> Iterator[Record]:
    """Yield the records of rows as in detection.yaml."""
    if isinstance(rows[0], dict):
        return (yield from (one for one in made(rows) if not isinstance(one, str)))
    for rank, first, last, *about in rows:
        if isinstance(first, str):
            yield RankEvent(EPOCH_S + last, "llama", rank, first)
            continue
        for step in range(first, last + 1):
            for one in (0, 1) if rank == "both" else (rank,):
                yield ranks_step(one, step, **dict(*about))


def test_steps_of_ranks_are_joined_as_in_the_golden_file(golden_case):
    text = ""
    for name, rows in cases(__file__).items():
        text += f"{name}:\n"
        text += "".join(line("  joined", step) for step in joined(two_ranks(rows)))
    golden_case(text)
