"""hang and crash: silence, heartbeats and deaths, in event time."""

from __future__ import annotations

import pytest

from tests.detectors.streams import Job, detection, opened
from warpwatch.daemon.detection import Detection
from warpwatch.telemetry.records import Clock, End, RankEvent, Step


def running(ranks: int = 2, steps: int = 200, **hang: object) -> tuple[Job, Detection]:
    job = Job(ranks=ranks, step_s=0.05, noise=0.05)
    engine = detection(hang={"timeout_s": 8, **hang})
    assert opened(engine, [*job.seen(), *job.steps(steps)]) == []
    return job, engine


def event(job: Job, rank: int, name: str, after_s: float = 0.0, **detail: object) -> RankEvent:
    return RankEvent(job.time + after_s, "llama", rank, name, detail)


def test_silence_is_a_hang_of_the_job_at_the_deadline_itself():
    job, engine = running()
    found = opened(engine, [Clock(job.time + 60)])
    assert [(a.kind, a.severity, a.rank, a.step) for a in found] == [
        ("hang", "critical", None, 199)
    ]
    assert found[0].time == job.time + 8
    assert found[0].value == pytest.approx(8.0)
    assert "for 8 s" in found[0].summary


def test_the_default_timeout_leaves_room_for_a_first_checkpoint_of_two_minutes():
    job, engine = Job(ranks=2, step_s=0.5), detection()
    opened(engine, job.steps(100))
    assert opened(engine, [Clock(job.time + 125)]) == []
    assert opened(engine, [Clock(job.time + 150)])[0].time == job.time + 140


def test_slow_steps_get_their_own_deadline():
    job, engine = Job(ranks=1, step_s=20.0, noise=0.01), detection()
    opened(engine, job.steps(100))
    found = opened(engine, [Clock(job.time + 3600)])
    assert found[0].time - job.time == pytest.approx(28 * 18.2, rel=0.02)


def test_a_pause_as_long_as_one_the_job_has_shown_is_no_hang():
    job, engine = running(timeout_s=2)
    assert [a.kind for a in opened(engine, job.steps(50))] == []
    engine = detection(hang={"timeout_s": 8})
    opened(engine, job.steps(20))
    opened(engine, job.steps(1, pause=lambda *_: 7.9))
    opened(engine, job.steps(20))
    assert opened(engine, [Clock(job.time + 9.4)]) == []
    assert len(opened(engine, [Clock(job.time + 9.7)])) == 1


def test_a_first_step_that_compiles_for_minutes_is_no_hang():
    job, engine = Job(ranks=2, step_s=0.05), detection(hang={"timeout_s": 8})
    opened(engine, job.steps(3))
    assert opened(engine, [Clock(job.time + 300)]) == []
    assert opened(engine, [Clock(job.time + 700)])[0].time == job.time + 600


def test_after_the_warm_up_the_short_timeout_holds_at_once():
    job, engine = Job(ranks=2, step_s=0.05), detection(hang={"timeout_s": 8})
    opened(engine, job.steps(7))
    assert opened(engine, [Clock(job.time + 60)])[0].time == job.time + 8


def test_resumed_steps_close_the_hang_and_it_can_come_again():
    job, engine = running()
    job.time += 30
    found = opened(engine, job.steps(10))
    assert [a.kind for a in found] == ["hang"]
    assert engine.active == ()
    assert [a.time for a in opened(engine, [Clock(job.time + 60)])] == [job.time + 8]


def test_a_stopped_process_is_a_hang_of_that_rank_at_once():
    job, engine = running()
    found = opened(engine, [event(job, 1, "stopped", 3.0), Clock(job.time + 3.5)])
    assert [(a.kind, a.rank, a.device, a.time) for a in found] == [
        ("hang", 1, "GPU-1", job.time + 3)
    ]
    assert "does not respond" in found[0].summary
    assert opened(engine, [Clock(job.time + 100)]) == []
    closed = engine.feed(event(job, 1, "resumed", 101.0))
    assert [a.end_time for a in closed] == [job.time + 101]
    assert opened(engine, [Clock(job.time + 105)]) == []


def test_the_only_rank_that_is_behind_its_peers_is_named():
    job, engine = running(ranks=4)
    last = job.time + 0.05
    ahead = [Step(last, "llama", rank, 200, 0.05) for rank in (0, 1, 3)]
    found = opened(engine, [*ahead, Clock(last + 60)])
    assert [(a.kind, a.rank) for a in found] == [("hang", 2)]


def test_a_job_that_ended_in_order_does_not_hang():
    job, engine = running()
    assert opened(engine, [End(job.time, "llama"), Clock(job.time + 3600)]) == []
    job, engine = running()
    ends = [End(job.time, "llama", 0), End(job.time + 1, "llama", 1)]
    assert opened(engine, [*ends, Clock(job.time + 3600)]) == []


def test_no_hang_while_a_capture_runs_until_its_timeout():
    job, engine = running()
    engine.feed(event(job, 0, "capture_started"))
    assert opened(engine, [event(job, 0, "stopped", 11.0), Clock(job.time + 119)]) == []
    assert [a.time for a in opened(engine, [Clock(job.time + 121)])] == [job.time + 120]


def test_after_a_capture_the_silence_counts_anew():
    job, engine = running()
    engine.feed(event(job, 0, "capture_started"))
    engine.feed(event(job, 0, "capture_finished", 30.0))
    assert opened(engine, [Clock(job.time + 37)]) == []
    assert [a.time for a in opened(engine, [Clock(job.time + 39)])] == [job.time + 38]


def test_an_exception_is_a_crash_at_once_with_its_text_on_one_line():
    job, engine = running()
    found = opened(engine, [event(job, 1, "exception", exception="ValueError", message="a\nb\x1b")])
    assert [(a.kind, a.severity, a.rank) for a in found] == [("crash", "critical", 1)]
    assert found[0].summary == "rank 1 raised ValueError: a b"


def test_a_death_is_a_crash_when_a_peer_lives_on_and_no_hang_beside_it():
    job, engine = running()
    found = opened(engine, [event(job, 1, "died", 1.0), Clock(job.time + 590)])
    assert [(a.kind, a.severity, a.rank, a.time) for a in found] == [
        ("crash", "critical", 1, job.time + 6)
    ]
    assert found[0].summary == (
        "rank 1 died without an exit record after step 199, 1 of its peers lived on"
    )


def test_all_ranks_gone_together_is_a_crash_for_information():
    job, engine = running()
    deaths = [event(job, 0, "died", 1.0), event(job, 1, "died", 1.2)]
    found = opened(engine, [*deaths, Clock(job.time + 3600)])
    assert [(a.kind, a.severity, a.rank) for a in found] == [("crash", "info", None)]
    assert "all 2 local ranks" in found[0].summary


def test_ranks_that_follow_a_crash_belong_to_it():
    job, engine = running(ranks=4)
    found = opened(
        engine,
        [
            event(job, 2, "exception", 0.0, exception="RuntimeError"),
            event(job, 0, "exception", 0.5, exception="ConnectionError"),
            event(job, 2, "died", 1.0),
            event(job, 0, "died", 1.1),
            event(job, 1, "died", 1.2),
            Clock(job.time + 60),
        ],
    )
    assert [(a.kind, a.rank) for a in found] == [("crash", 2)]
    assert engine.active[0].summary.startswith("rank 2 raised RuntimeError; ")


def test_a_crash_stays_active_for_the_hold_time_and_no_longer():
    job, engine = running()
    engine.feed(event(job, 1, "exception"))
    engine.feed(Clock(job.time + 599))
    assert [a.kind for a in engine.active] == ["crash"]
    closed = engine.feed(Clock(job.time + 700))
    assert [a.end_time for a in closed if a.kind == "crash"] == [job.time + 600]
