"""The engine: life of an anomaly, joined steps, levels, and replay of logs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.detectors.streams import EPOCH_S, Job, detection, opened
from warpwatch.daemon.config import Config, DetectorsConfig
from warpwatch.daemon.detection import EXPLAINED_BY, MAX_JOBS, anomaly_to_json
from warpwatch.daemon.detectors import DETECTORS
from warpwatch.daemon.detectors.base import JobStep
from warpwatch.daemon.detectors.job_steps import JobSteps
from warpwatch.daemon.detectors.level import Baseline, BlockSpan, Persistence
from warpwatch.daemon.errors import UsageError
from warpwatch.daemon.replay import replay
from warpwatch.telemetry.anomalies import JOB_KINDS, Anomaly
from warpwatch.telemetry.log import encode
from warpwatch.telemetry.records import Clock, End, RankEvent, Record, Step


def lines(records: Iterable[Record]) -> list[str]:
    return [json.dumps(encode(record)) + "\n" for record in records]


def test_every_detector_has_a_file_a_section_and_a_kind_of_the_closed_set():
    folder = Path(__file__).parents[2] / "daemon/warpwatch/daemon/detectors"
    shared = {"__init__", "base", "capture_windows", "job_steps", "level", "rank_levels"}
    assert {path.stem for path in folder.glob("*.py")} - shared == DETECTORS.keys()
    assert set(DetectorsConfig.__struct_fields__) == DETECTORS.keys()
    assert DETECTORS.keys() <= set(JOB_KINDS)
    assert [make(Config()).kind for make in DETECTORS.values()] == list(DETECTORS)
    assert EXPLAINED_BY.keys() <= DETECTORS.keys()


def test_an_anomaly_keeps_id_and_begin_while_its_values_follow():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    first = opened(engine, job.steps(60, compute=lambda *_: 0.2))[0]
    opened(engine, job.steps(60, compute=lambda *_: 0.3))
    (now,) = engine.active
    assert (now.id, now.time, now.begin_step) == (first.id, first.time, first.begin_step)
    assert first.value == pytest.approx(0.65, rel=0.05)
    assert now.value == pytest.approx(0.75, rel=0.05)


def test_while_input_stalls_no_regression_of_the_same_job_is_opened():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    opened(engine, job.steps(100, wait=lambda *_: 0.3))
    found = opened(engine, job.steps(100, wait=lambda *_: 0.3, compute=lambda *_: 0.2))
    assert found == []
    assert [a.kind for a in engine.active] == ["data_stall"]


def test_another_culprit_is_another_anomaly():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    opened(engine, job.steps(60, compute=lambda _, rank: 0.2 if rank == 1 else 0.0))
    opened(engine, job.steps(120, compute=lambda _, rank: 0.2 if rank == 3 else 0.0))
    ranks = [a.rank for a in (*engine.history, *engine.active)]
    assert (ranks[0], ranks[-1]) == (1, 3)
    assert len({a.id for a in (*engine.history, *engine.active)}) == len(ranks)


def test_the_end_of_a_job_closes_its_states_and_frees_its_memory():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    opened(engine, job.steps(60, compute=lambda *_: 0.2))
    changed = engine.feed(End(job.time, "llama"))
    assert [a.end_time for a in changed] == [job.time]
    assert engine.active == ()
    assert [vars(detector)["_jobs"] for detector in engine._detectors] == [{}] * len(DETECTORS)


def test_more_jobs_than_the_bound_forget_the_oldest():
    engine = detection()
    for number in range(MAX_JOBS + 50):
        engine.feed(Step(EPOCH_S + number / 100, f"job-{number}", 0, 0, 0.1))
    assert len(engine._ranks) == MAX_JOBS
    assert all(len(vars(detector)["_jobs"]) <= MAX_JOBS for detector in engine._detectors)


def test_deadlines_fall_in_event_time_and_in_their_order():
    engine = detection(hang={"timeout_s": 8})
    slow = Job(ranks=1)
    opened(engine, slow.steps(100))
    engine.feed(RankEvent(slow.time + 5, "bert", 0, "died"))
    found = opened(engine, [Clock(slow.time + 1_000)])
    assert [(a.kind, round(a.time - slow.time, 3)) for a in found] == [("hang", 8), ("crash", 10)]


def joined(steps: JobSteps, *records: Record) -> list[JobStep]:
    return [step for record in records for step in steps.observe(record)]


def ranks_step(rank: int, step: int, **phases: float) -> Step:
    return Step(EPOCH_S + step + rank / 10, "llama", rank, step, 1.0, phases_s=phases)


def test_steps_of_ranks_that_arrive_in_batches_are_joined():
    steps = JobSteps(120)
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
    steps = JobSteps(120)
    joined(steps, ranks_step(0, 0), ranks_step(1, 0))
    rest = [ranks_step(0, 1), ranks_step(0, 2), ranks_step(1, 2), ranks_step(1, 2)]
    assert [step.step for step in joined(steps, *rest, ranks_step(0, 1))] == [2]


def test_a_silent_rank_holds_up_at_most_64_steps():
    steps = JobSteps(120)
    joined(steps, ranks_step(0, 0), ranks_step(1, 0))
    found = joined(steps, *[ranks_step(0, n) for n in range(1, 101)])
    assert [step.step for step in found] == list(range(1, 37))


def test_a_rank_that_died_is_waited_for_no_longer():
    steps = JobSteps(120)
    joined(steps, ranks_step(0, 0), ranks_step(1, 0))
    died = RankEvent(EPOCH_S + 1, "llama", 1, "died")
    assert [step.step for step in joined(steps, died, ranks_step(0, 1))] == [1]


def test_a_restart_counts_its_warm_up_anew():
    steps = JobSteps(120)
    joined(steps, *[ranks_step(0, n) for n in range(10)])
    assert [step.index for step in joined(steps, ranks_step(0, 0), ranks_step(0, 1))] == [0, 1]


def test_a_capture_and_five_steps_after_it_are_left_out():
    steps = JobSteps(120)
    joined(steps, ranks_step(0, 0))
    begin = RankEvent(EPOCH_S, "llama", 0, "capture_armed")
    end = RankEvent(EPOCH_S + 3, "llama", 0, "capture_finished")
    inside = [ranks_step(0, n) for n in (1, 2, 3)]
    after = [ranks_step(0, n) for n in range(4, 11)]
    assert [s.step for s in joined(steps, begin, *inside, end, *after)] == [9, 10]


def test_a_baseline_freezes_its_level_and_goes_on_learning_its_noise():
    baseline = Baseline(size=4, ready_blocks=4)
    for level in (1.0, 1.1, 0.9, 1.0):
        baseline.add(level)
    assert (baseline.ready, baseline.center) == (True, 1.0)
    quiet = baseline.spread
    for level in (1.5, 0.5) * 20:
        baseline.add(level)
    assert baseline.center == 1.0
    assert baseline.spread > 3 * quiet


def test_a_constant_series_has_a_spread_of_four_per_mille():
    baseline = Baseline(size=10, ready_blocks=4)
    for _ in range(10):
        baseline.add(2.0)
    assert baseline.spread == pytest.approx(0.008)


def test_persistence_turns_on_after_its_hold_and_off_after_two_calm_blocks():
    state, span = Persistence(hold=3), BlockSpan(steps=1, seconds=0)
    excesses = [1.2, 1.2, 0.9, 1.2, 1.2, 1.2, 0.8, 0.3, 0.3]
    states = []
    for step, excess in enumerate(excesses):
        span.restart()
        span.add(step, 0.1)
        states.append(state.update(excess, span))
    assert states == [False] * 5 + [True] * 3 + [False]
    assert state.begin_step == 3


def test_persistence_waits_for_its_seconds_too():
    state, span = Persistence(hold=2, hold_s=1.0), BlockSpan(steps=1, seconds=0)
    span.add(0, 0.3)
    assert [state.update(2.0, span) for _ in range(5)] == [False, False, False, True, True]


def test_replay_says_what_the_engine_says_once_an_anomaly():
    job = Job(ranks=2, step_s=0.5, noise=0.02)
    records = [*job.seen(), *job.steps(500)]
    records += job.steps(300, compute=lambda _, rank: 0.2 if rank == 1 else 0.0)
    found = list(replay(lines(records), Config()))
    assert [(a.kind, a.rank) for a in found] == [("straggler", 1)]


def test_bad_lines_are_left_out_and_told_in_one_line(capsys):
    job = Job(ranks=1)
    bad: list[str | bytes] = ["{torn", '{"type":"strange","time":1}\n', b"\xff\xfe\n", "\n"]
    log = [*lines(job.steps(5)), *bad]
    assert list(replay(log, Config())) == []
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("warpwatch: 3 bad lines (not JSON 2, type 1), the first is line 6: ")


@pytest.mark.parametrize("log", [[], ["hello\n"] * 10, ["[1]\n"], ["{}\n"] * 1000, [b"\x00\x01\n"]])
def test_a_file_that_is_no_telemetry_log_is_a_usage_error(log):
    with pytest.raises(UsageError, match="no telemetry log"):
        list(replay(log, Config()))


def test_replay_gives_up_on_an_endless_strange_file():
    def endless() -> Iterator[str]:
        while True:
            yield "noise\n"

    with pytest.raises(UsageError, match="100 bad lines"):
        list(replay(endless(), Config()))


def test_the_json_form_has_the_keys_of_the_design():
    anomaly = Anomaly("1-1", 1.0, "hang", "critical", "silent", job="llama")
    assert anomaly_to_json(anomaly) == {
        "time": 1.0, "kind": "hang", "severity": "critical", "job": "llama", "rank": None,
        "device": None, "step": None, "begin_step": None, "value": None, "baseline": None,
        "summary": "silent",
    }  # fmt: skip
