"""The engine: records through detectors, joined steps, and replay of logs."""

from collections import Counter

import pytest
from msgspec.structs import replace

from tests.detection import jobs
from tests.detection.life import LLAMA
from tests.detection.streams import EPOCH_S, Job, detection, fed, opened
from warpwatch_detection import ranks as ranks_module
from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.anomalies.explanation import DEVICE_CAUSES, EXPLAINED_BY, JOB_CAUSES
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import JobStep
from warpwatch_detection.detectors import DETECTORS
from warpwatch_detection.job_steps import STEPS_AFTER_CAPTURE, JobSteps
from warpwatch_detection.ranks import DEPARTED_S, MAX_JOBS, SILENT_S, LiveRank, RankDevices
from warpwatch_telemetry.anomalies import DEVICE_KINDS, JOB_KINDS, KINDS
from warpwatch_telemetry.records import Clock, End, RankEvent, RankSeen, Record, Step


def test_every_kind_has_a_detector_and_causes_are_kinds():
    assert DETECTORS.keys() == set(KINDS)
    for causes, effects, reasons in (
        (DEVICE_CAUSES, JOB_KINDS, DEVICE_KINDS),
        (JOB_CAUSES, DEVICE_KINDS, JOB_KINDS),
    ):
        assert set(causes) <= set(effects)
        assert {reason for group in causes.values() for reason in group} <= set(reasons)
    assert [make(DetectionConfig(), AnomaliesConfig()).kind for make in DETECTORS.values()] == list(
        DETECTORS
    )


def test_a_cause_judges_before_what_it_explains():
    order = list(DETECTORS)
    for kind, causes in (*EXPLAINED_BY.items(), *DEVICE_CAUSES.items()):
        # If each may cause the other, the first that is found is the cause.
        alone = [cause for cause in causes if kind not in EXPLAINED_BY.get(cause, ())]
        assert [c for c in alone if order.index(c) > order.index(kind)] == [], kind


def test_an_anomaly_keeps_id_and_begin_while_its_values_follow():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    first = opened(engine, job.steps(60, compute=lambda _, rank: 0.2 * (rank == 1)))[0]
    opened(engine, job.steps(60, compute=lambda _, rank: 0.3 * (rank == 1)))
    (now,) = engine.active
    assert (now.id, now.time, now.begin_step) == (first.id, first.time, first.begin_step)
    assert first.value == pytest.approx(0.60, rel=0.05)
    assert now.value == pytest.approx(0.70, rel=0.05)


def test_while_input_stalls_no_regression_of_the_same_job_is_opened():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    opened(engine, job.steps(100, wait=lambda *_: 0.3))
    found = opened(engine, job.steps(100, wait=lambda *_: 0.3, compute=lambda *_: 0.2))
    assert found == []
    assert [a.kind for a in engine.active] == ["data_stall"]


def test_another_culprit_is_another_anomaly():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    opened(engine, job.steps(60, compute=lambda _, rank: 0.2 if rank == 1 else 0.0))
    opened(engine, job.steps(120, compute=lambda _, rank: 0.2 if rank == 3 else 0.0))
    ranks = [a.rank for a in (*engine.history, *engine.active)]
    assert (ranks[0], ranks[-1]) == (1, 3)
    assert len({a.id for a in (*engine.history, *engine.active)}) == len(ranks)


def test_the_end_of_a_job_closes_its_states_and_frees_its_memory():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    opened(engine, job.steps(60, compute=lambda *_: 0.2))
    changed = fed(engine, [End(job.time, "llama")])
    assert [a.end_time for a in changed] == [job.time]
    assert engine.active == ()
    remembered = snapshot.save(
        {name: part for name, part in engine.parts().items() if name != "engine"}
    )
    assert b"llama" not in remembered


def test_of_more_jobs_than_the_bound_those_that_live_stay():
    engine = detection()
    for step in range(3):
        for number in range(MAX_JOBS + 50):
            engine.feed(Step(EPOCH_S + step, f"job-{number:03}", 0, step, 0.1))
    assert engine.refused == {"anomalies": 0, "jobs": 50}
    remembered = snapshot.save(engine.parts())
    assert b"job-000" in remembered
    assert b"job-255" in remembered
    assert b"job-256" not in remembered


def test_a_job_that_was_silent_for_long_makes_room_for_another():
    engine = detection()
    for number in range(MAX_JOBS):
        engine.feed(Step(EPOCH_S + (number != 7), f"job-{number:03}", 0, 0, 0.1))
    engine.feed(Step(EPOCH_S + SILENT_S, "job-new", 0, 0, 0.1))
    assert engine.refused == {"anomalies": 0, "jobs": 1}
    remembered = snapshot.save(engine.parts())
    assert b"job-007" not in remembered
    assert b"job-new" in remembered


def test_a_killed_ranks_crash_names_the_gpu_that_it_ran_on():
    engine = detection()
    engine.feed(RankSeen(EPOCH_S, "llama", 0, 2, device="GPU-0"))
    engine.feed(RankSeen(EPOCH_S, "llama", 1, 2, device="GPU-1"))
    job = Job(ranks=2)
    opened(engine, job.steps(50))
    engine.feed(RankEvent(job.time, "llama", 1, "died"))
    (crash,) = opened(engine, [Clock(job.time + 60)])
    assert (crash.kind, crash.rank, crash.device) == ("crash", 1, "GPU-1")


def test_an_owner_with_many_jobs_leaves_room_for_those_of_others():
    engine = detection()
    for number in range(MAX_JOBS):
        engine.feed(Step(EPOCH_S + number, f"job-{number}", 0, 1, 1.0, owner="uid/7"))
    now = EPOCH_S + MAX_JOBS
    for number in range(3):
        engine.feed(Step(now + number, f"honest-{number}", 0, 1, 1.0, owner="ns/team"))
    owners = Counter(job.owner for job in engine.state.ranks.jobs)
    assert owners == {"uid/7": MAX_JOBS - 3, "ns/team": 3}
    assert engine.refused["jobs"] == 3


def test_the_places_of_the_departed_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "MAX_DEPARTED", 50)
    rank_devices = RankDevices()
    for number in range(100):
        rank_devices.jobs[LLAMA] = {number: LiveRank(device="GPU-0")}
        rank_devices.leave(End(EPOCH_S, "llama", number))
    assert len(rank_devices.departed) == 50
    rank_devices.jobs[LLAMA] = {0: LiveRank(device="GPU-0")}
    rank_devices.leave(End(EPOCH_S + DEPARTED_S + 1, "llama", 0))
    assert list(rank_devices.departed) == [(LLAMA, 0)]


def test_a_forgotten_job_takes_its_anomalies_with_it():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    opened(engine, job.steps(60, compute=lambda _, rank: 0.2 if rank == 1 else 0.0))
    assert [a.kind for a in engine.active] == ["straggler"]
    for number in range(MAX_JOBS):
        engine.feed(Step(job.time + SILENT_S, f"job-{number}", 0, 0, 0.1))
    assert [a.kind for a in engine.active if a.job == "llama"] == []


def test_deadlines_fall_in_event_time_and_in_their_order():
    engine = detection(hang={"timeout_s": 8})
    slow = Job(ranks=1)
    opened(engine, slow.steps(100))
    engine.feed(RankEvent(slow.time + 5, "bert", 0, "died"))
    found = opened(engine, [Clock(slow.time + 1_000)])
    assert [(a.kind, round(a.time - slow.time, 3)) for a in found] == [("hang", 8), ("crash", 10)]


def joined(steps: JobSteps, *records: Record) -> list[JobStep]:
    return jobs.joined(records, steps)


def ranks_step(rank: int, step: int, **phases: float) -> Step:
    return Step(EPOCH_S + step + rank / 10, "llama", rank, step, 1.0, phases_s=phases)


def test_steps_of_ranks_that_arrive_in_batches_are_joined():
    steps = JobSteps()
    joined(steps, ranks_step(0, 0), ranks_step(1, 0))
    batch = [ranks_step(0, n, comm=0.5) for n in (1, 2, 3)]
    batch += [ranks_step(1, n, comm=0.1, data_wait=0.2) for n in (1, 2, 3)]
    found = joined(steps, *batch)
    assert [step.step for step in found] == [1, 2, 3]
    assert found[0].compute_s == {0: 0.5, 1: pytest.approx(0.7)}
    assert found[0].data_wait_s == {0: 0.0, 1: 0.2}
    assert found[0].common_s == pytest.approx(0.5 + 0.1)
    assert found[0].time == EPOCH_S + 1.1


def test_a_lost_record_costs_one_step_and_a_repeated_one_nothing():
    steps = JobSteps()
    joined(steps, ranks_step(0, 0), ranks_step(1, 0))
    rest = [ranks_step(0, 1), ranks_step(0, 2), ranks_step(1, 2), ranks_step(1, 2)]
    assert [step.step for step in joined(steps, *rest, ranks_step(0, 1))] == [2]


def test_a_silent_rank_holds_up_at_most_64_steps():
    steps = JobSteps()
    joined(steps, ranks_step(0, 0), ranks_step(1, 0))
    found = joined(steps, *[ranks_step(0, n) for n in range(1, 101)])
    assert [step.step for step in found] == list(range(1, 37))


def test_a_rank_that_died_is_waited_for_no_longer():
    steps = JobSteps()
    joined(steps, ranks_step(0, 0), ranks_step(1, 0))
    died = RankEvent(EPOCH_S + 1, "llama", 1, "died")
    assert [step.step for step in joined(steps, died, ranks_step(0, 1))] == [1]


def test_a_restart_counts_its_warm_up_again():
    steps = JobSteps()
    joined(steps, *[ranks_step(0, n) for n in range(10)])
    assert [step.index for step in joined(steps, ranks_step(0, 0), ranks_step(0, 1))] == [0, 1]


def died(rank: int) -> RankEvent:
    return RankEvent(EPOCH_S, "llama", rank, "died")


@pytest.mark.parametrize("first", [0, 4000])
def test_ranks_that_are_replaced_one_after_the_other_are_joined_again(first: int) -> None:
    steps = JobSteps()
    joined(steps, *[ranks_step(rank, n) for n in range(4900, 5001) for rank in (0, 1)])
    # The first has a successor before the second is seen to be gone.
    swap: list[Record] = [died(0), ranks_step(0, first), ranks_step(0, first + 1), died(1)]
    joined(steps, *swap)
    again = [ranks_step(rank, first + n) for n in range(2, 302) for rank in (1, 0)]
    found = joined(steps, *again)
    assert [step.step for step in found[-299:]] == list(range(first + 3, first + 302))
    assert all(len(step.compute_s) == 2 for step in found[-299:])
    assert found[-1].index <= 302


def test_late_records_of_a_rank_that_left_are_no_restart():
    steps = JobSteps()
    joined(steps, *[ranks_step(rank, n) for n in range(100) for rank in (0, 1)])
    late: list[Record] = [died(1), ranks_step(1, 98), ranks_step(1, 99), died(1)]
    assert joined(steps, *late) == []
    assert [step.index for step in joined(steps, ranks_step(0, 100))] == [100]


def test_a_rank_that_is_read_late_for_the_first_time_is_no_restart():
    steps = JobSteps()
    joined(steps, *[ranks_step(0, n) for n in range(200)])
    assert joined(steps, *[ranks_step(1, n) for n in range(200)]) == []
    assert [s.index for s in joined(steps, ranks_step(0, 200), ranks_step(1, 200))] == [200]


def test_a_capture_and_twenty_steps_after_it_are_left_out():
    steps = JobSteps()
    joined(steps, ranks_step(0, 0))
    begin = RankEvent(EPOCH_S, "llama", 0, "capture_armed")
    end = RankEvent(EPOCH_S + 3, "llama", 0, "capture_finished")
    inside = [ranks_step(0, n) for n in (1, 2, 3)]
    after = [ranks_step(0, n) for n in range(4, 26)]
    assert [s.step for s in joined(steps, begin, *inside, end, *after)] == [24, 25]


def step(number: int, rank: int = 0, profiled: bool = False) -> Step:
    return Step(EPOCH_S + number, "llama", rank, number, 1.0, profiled=profiled)


@pytest.mark.parametrize(
    ("profiled", "ranks", "judged"),
    [
        pytest.param({(3, 0), (4, 0)}, 1, [0, 1, 2, *range(25, 30)], id="and twenty after it"),
        pytest.param({(1, 1)}, 2, [0, *range(22, 30)], id="of one rank for all"),
    ],
)
def test_a_profiled_step_is_left_out_without_any_event_or_gap_in_the_index(profiled, ranks, judged):
    records = [step(n, rank, (n, rank) in profiled) for n in range(30) for rank in range(ranks)]
    seen = joined(JobSteps(), *records)
    assert [one.step for one in seen] == judged
    assert [one.index for one in seen] == list(range(len(judged)))


def test_slow_steps_after_a_capture_raise_nothing():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    profiled = [replace(each, profiled=True) for each in job.steps(5, compute=lambda *_: 0.5)]
    assert opened(engine, profiled) == []
    after = job.steps(STEPS_AFTER_CAPTURE, compute=lambda *_: 0.3)
    assert opened(engine, after) == []
    assert opened(engine, job.steps(100)) == []


def test_a_capture_of_one_rank_masks_until_its_end_is_reported():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    engine.feed(RankEvent(job.time, "llama", 1, "capture_armed"))
    assert opened(engine, job.steps(60, compute=lambda *_: 0.3)) == []
    engine.feed(RankEvent(job.time, "llama", 1, "capture_finished"))
    assert opened(engine, job.steps(STEPS_AFTER_CAPTURE, compute=lambda *_: 0.3)) == []
    assert opened(engine, job.steps(100)) == []
