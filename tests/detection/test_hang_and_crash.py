"""hang, crash and oom: silence, heartbeats and deaths, in event time."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from tests.cases import cases
from tests.detection.streams import Job, alone, kinds_of, on, opened, restart
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import Clock, DeviceReading, End, RankEvent, RankSeen, Record, Step


def running(ranks: int = 2, steps: int = 200, **hang: object) -> tuple[Job, Detection]:
    job = Job(ranks=ranks, step_s=0.05, noise=0.05)
    engine = alone("hang", "crash", "oom", hang={"timeout_s": 8, **hang})
    assert opened(engine, [*job.seen(), *job.steps(steps)]) == []
    return job, engine


def event(job: Job, rank: int, name: str, after_s: float = 0.0, **detail: object) -> RankEvent:
    return RankEvent(job.time + after_s, "llama", rank, name, detail)


def told(job: Job, events: Iterable[Sequence[Any]]) -> Iterator[Record]:
    for after_s, *about in events:
        if not about:
            yield Clock(job.time + after_s)
        elif about[1] == "end":
            yield End(job.time + after_s, "llama", about[0])
        elif about[1] == "rank":
            yield RankSeen(job.time + after_s, "llama", about[0], job.ranks, f"GPU-{about[0]}")
        elif about[1] == "step":
            yield Step(job.time + after_s, "llama", about[0], 200, 0.05)
        else:
            yield event(job, about[0], about[1], after_s, **dict(*about[2:]))


def silent_until(engine: Detection, time: float) -> Anomaly:
    """The hang that is found by then."""
    (found,) = opened(engine, [Clock(time)])
    assert found.kind == "hang"
    return found


STORIES = cases(__file__)


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("name", STORIES)
def test_what_happens_after_the_last_step_is_told_once(name, restarts, golden_report):
    story = STORIES[name]
    training = [
        (s, rank, "training") for s in range(2, 60, 2) for rank in story.get("training", ())
    ]
    job, engine = running(story["ranks"])
    found: list[Anomaly] = []
    for record in told(job, [*training, *story["events"]]):
        if restarts:
            restart(engine)
        found += opened(engine, [record])
    seen = [[a.kind, a.severity, a.rank, round(a.time - job.time, 6)] for a in found]
    assert seen == story["found"]
    for anomaly in found:
        assert anomaly.device == (None if anomaly.rank is None else f"GPU-{anomaly.rank}")
    known, over_s = [*engine.history, *engine.active], story.get("over")
    assert len(known) == len(found)
    for now in known:
        assert story.get("says", "") in now.summary
        assert now.end_time == (over_s and job.time + over_s)
    golden_report(engine, name)


def test_a_leap_of_the_clock_is_no_silence_but_silence_after_it_is():
    job, engine = running()
    job.time += 3600
    engine.skip_to(job.time)
    assert opened(engine, [Clock(job.time), *job.steps(300), Clock(job.time + 7)]) == []
    job, engine = running()
    job.time += 3600
    engine.skip_to(job.time)
    opened(engine, [Clock(job.time)])
    # Nobody is blamed before all have had the time to be heard.
    assert silent_until(engine, job.time + 60).time == job.time + 20


@pytest.mark.parametrize(
    ("steps", "step_s", "config", "deadline_s"),
    [
        pytest.param(100, 0.5, {}, 140.0, id="room for a first checkpoint of two minutes"),
        pytest.param(100, 20.0, {}, 28 * 18.2, id="slow steps get their own"),
        pytest.param(3, 0.05, {"timeout_s": 8}, 600.0, id="a first step may compile for minutes"),
        pytest.param(7, 0.05, {"timeout_s": 8}, 8.0, id="after the warm-up it is short at once"),
    ],
)
def test_the_deadline_of_silence(steps, step_s, config, deadline_s):
    job, engine = Job(ranks=2, step_s=step_s, noise=0.01), alone("hang", hang=config)
    opened(engine, job.steps(steps))
    assert opened(engine, [Clock(job.time + 0.97 * deadline_s)]) == []
    hang = silent_until(engine, job.time + 3600)
    assert hang.time - job.time == pytest.approx(deadline_s, rel=0.02)


def test_a_finished_rank_that_trains_again_in_another_thread_may_hang():
    job, engine = running()
    opened(engine, [event(job, rank, "finished", 1.0) for rank in (0, 1)])
    job.time += 60
    assert opened(engine, job.steps(20)) == []
    silent_until(engine, job.time + 60)


def test_a_pause_as_long_as_one_the_job_has_shown_is_no_hang():
    job, engine = Job(ranks=2, step_s=0.05, noise=0.05), alone("hang", hang={"timeout_s": 8})
    opened(engine, [*job.steps(20), *job.steps(1, pause=on(None, 7.9)), *job.steps(20)])
    assert opened(engine, [Clock(job.time + 9.0)]) == []
    silent_until(engine, job.time + 9.3)


def test_resumed_steps_close_the_hang_and_it_can_come_again():
    job, engine = running()
    job.time += 30
    assert [a.kind for a in opened(engine, job.steps(10))] == ["hang"]
    assert not engine.active
    engine.feed(Clock(job.time + 60))
    (again,) = engine.active
    assert (again.kind, round(again.value or 0.0, 3)) == ("hang", 8.0)


def test_the_only_rank_that_is_behind_its_peers_is_named():
    job, engine = running(ranks=4)
    ahead = [Step(job.time + 0.05, "llama", rank, 200, 0.05) for rank in (0, 1, 3)]
    assert kinds_of(opened(engine, [*ahead, Clock(job.time + 60)])) == [("hang", 2)]


def test_a_crash_that_a_restart_of_the_daemon_finds_is_not_dated_by_the_start_of_its_rank():
    job, engine = running(ranks=1)
    opened(engine, [event(job, 0, "died")])
    restart(engine)
    (found,) = opened(engine, [RankSeen(job.time - 9, "llama", 0, 1)])
    assert (found.kind, found.time) == ("crash", job.time)


def test_a_restarted_job_is_no_second_crash_and_closes_its_hang():
    job, engine = running(ranks=4)
    silent_until(engine, job.time + 9)
    found = opened(engine, [event(job, 1, "died", 10.0), Clock(job.time + 16)])
    assert kinds_of(found) == [("crash", 1)]
    again = Job(ranks=4, step_s=0.05, noise=0.05)
    again.time = job.time + 20
    # The old processes go one after the other while the new ones come.
    swap: list[Record] = [RankSeen(again.time, "llama", 1, 4)]
    for rank in (0, 2, 3):
        swap += [event(again, rank, "died", 1.0), RankSeen(again.time + 1.5, "llama", rank, 4)]
    again.time += 3
    assert opened(engine, [*swap, *again.steps(300), Clock(again.time + 7)]) == []
    assert [a.kind for a in engine.active] == ["crash"]


def hangs(engine: Detection, job: Job, pauses_s: Iterable[float]) -> list[bool]:
    """Return whether each pause of all ranks, with 100 steps before it, was reported."""
    reported = []
    for pause_s in pauses_s:
        opened(engine, job.steps(100))
        found = opened(engine, job.steps(1, pause=on(None, pause_s)))
        reported.append([a.kind for a in found] == ["hang"])
        opened(engine, job.steps(1))
        assert engine.active == ()
    return reported


@pytest.mark.parametrize(
    ("pauses_s", "reported", "longest_s"),
    [
        pytest.param([200, 205, 195, 210, 220], [1, 1, 0, 0, 0], 220, id="evaluations"),
        pytest.param([3000, 150, 150], [1, 1, 0], 150, id="one long outage lengthens nothing"),
    ],
)
def test_a_pause_that_is_longer_than_the_timeout_is_found_twice_and_then_known(
    pauses_s, reported, longest_s
):
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("hang")
    assert hangs(engine, job, pauses_s) == reported
    hang = silent_until(engine, job.time + 3600)
    assert hang.time - job.time == pytest.approx(1.15 * longest_s, abs=2)


def test_ranks_that_go_on_one_after_the_other_teach_a_pause_as_well():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), alone("hang")
    for _ in range(2):
        opened(engine, job.steps(100))
        after = [
            Step(record.time + 0.01 * record.rank, "llama", record.rank, record.step, 200.0)
            for record in job.steps(1, pause=lambda *_: 200.0)
        ]
        assert [a.kind for a in opened(engine, after)] == ["hang"]
    assert hangs(engine, job, [205]) == [False]


def test_a_stopped_rank_that_is_let_go_teaches_no_pause():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), alone("hang")
    for _ in range(3):
        opened(engine, job.steps(100))
        found = opened(engine, [event(job, 1, "stopped", 10.0), Clock(job.time + 200)])
        assert [a.rank for a in found] == [1]
        job.time += 200
        opened(engine, job.steps(1))
    (hang,) = opened(engine, [Clock(job.time + 3600)])
    assert hang.time - job.time == pytest.approx(140, abs=1)


def test_a_pause_in_which_a_rank_died_is_not_known_afterwards():
    job, engine = Job(ranks=3, step_s=0.5, noise=0.02), alone("hang")
    opened(engine, job.steps(100))
    for rank in (2, 1):
        opened(engine, [Clock(job.time + 800), event(job, rank, "died", 800)])
        job.ranks -= 1
        job.time += 800
        opened(engine, job.steps(100))
    # The silence counts from the end of the crash's ten minutes.
    (hang,) = opened(engine, [Clock(job.time + 3600)])
    assert hang.time - job.time < 700


def quiet(job: Job, seconds: int, ranks: int = 2, **said: object) -> Iterator[RankEvent]:
    """Processes that do nothing, read every 2 s."""
    for after_s in range(0, seconds, 2):
        for rank in range(ranks):
            detail = {"cpu_s": 50.0 + 0.005 * after_s, "io_bytes": 1000 + 16 * after_s, **said}
            yield event(job, rank, "process", float(after_s), **detail)


def devices(job: Job, seconds: int, **values: float) -> Iterator[DeviceReading]:
    for after_s in range(seconds):
        for rank in (0, 1):
            metrics: dict[SeriesKey, float] = {
                (f"device_{name}", ()): value for name, value in values.items()
            }
            yield DeviceReading(job.time + after_s, f"GPU-{rank}", metrics)


def in_order(*streams: Iterable[Record]) -> list[Record]:
    return sorted((r for stream in streams for r in stream), key=lambda record: record.time)


def on_cpu(world: int = 2) -> tuple[Job, Detection]:
    job, engine = Job(ranks=2, step_s=0.05, noise=0.05), alone("hang")
    seen = [RankSeen(job.time, "llama", rank, world) for rank in (0, 1)]
    assert opened(engine, [*seen, *job.steps(200)]) == []
    return job, engine


def test_a_job_of_which_nothing_moves_hangs_within_30_seconds():
    job, engine = on_cpu()
    found = opened(engine, quiet(job, 60))
    assert [(a.kind, a.time - job.time) for a in found] == [("hang", 20.0)]
    assert found[0].summary.startswith("no rank has finished a step for 20 s (a step takes 0.04")
    assert found[0].summary.endswith(", nothing of the job has moved for 20 s")
    opened(engine, job.steps(1))
    assert engine.active == ()


def test_a_rest_that_was_over_by_itself_is_known_from_then_on():
    job, engine = on_cpu()
    opened(engine, quiet(job, 40))
    job.time += 40
    opened(engine, job.steps(100))
    assert engine.active == ()
    hung = [r.time - job.time for r in quiet(job, 60) if engine.feed(r) and engine.active]
    assert hung[0] == 48.0


@pytest.mark.parametrize(
    ("moving", "world"),
    [
        pytest.param({"disk_wait": True}, 2, id="waits for a disk"),
        pytest.param({"io_bytes": None}, 2, id="transfers are not known"),
        pytest.param({"cpu_s": None}, 2, id="processor time is not known"),
        pytest.param({}, 4, id="ranks on other nodes may be at a checkpoint"),
    ],
)
def test_what_cannot_be_seen_or_waits_for_a_disk_counts_as_moving(moving, world):
    job, engine = on_cpu(world)
    assert opened(engine, quiet(job, 130, **moving)) == []


def test_a_checkpoint_that_one_rank_writes_for_two_minutes_is_no_hang():
    job, engine = on_cpu()
    for record in quiet(job, 120):
        written = 10**7 * (record.time - job.time) if record.rank == 0 else 0
        detail = {**record.detail, "io_bytes": written}
        assert engine.feed(RankEvent(record.time, "llama", record.rank, "process", detail)) == []


def on_devices() -> tuple[Job, Detection]:
    job, engine = Job(ranks=2, step_s=0.5, noise=0.05), alone("hang")
    working = {"utilization_ratio": 0.98, "memory_utilization_ratio": 0.5, "power_watts": 600.0}
    begin = devices(job, 100, **working)
    assert opened(engine, [*job.seen(), *in_order(begin, job.steps(200))]) == []
    return job, engine


SPINS = {"utilization_ratio": 1.0, "memory_utilization_ratio": 0.0, "power_watts": 160.0}


def test_processes_at_rest_hang_only_when_their_devices_do_nothing_too():
    job, engine = on_devices()
    busy = {"utilization_ratio": 1.0, "memory_utilization_ratio": 0.6, "power_watts": 600.0}
    assert opened(engine, in_order(quiet(job, 100), devices(job, 100, **busy))) == []
    job, engine = on_devices()
    assert opened(engine, quiet(job, 100)) == []
    job, engine = on_devices()
    found = opened(engine, in_order(quiet(job, 60), devices(job, 60, utilization_ratio=0.0)))
    assert [a.time - job.time for a in found] == [20.0]


def spinning(records: Iterable[RankEvent], *ranks: int) -> Iterator[RankEvent]:
    """The processors of ``ranks`` work all the time."""
    for record in records:
        cpu_s = record.time if record.rank in ranks else 0.0
        yield RankEvent(
            record.time, "llama", record.rank, "process", {**record.detail, "cpu_s": cpu_s}
        )


def one_idle_one_spins(job: Job) -> list[Record]:
    idle = (r for r in devices(job, 60, utilization_ratio=0.0) if r.device == "GPU-0")
    spins = (r for r in devices(job, 60, **SPINS) if r.device == "GPU-1")
    return in_order(idle, spins)


@pytest.mark.parametrize(
    ("spin", "both_devices", "expected"),
    [
        pytest.param((0, 1), True, [(None, 20.0)], id="all spin in a collective: a hang"),
        pytest.param((1,), False, [(0, 20.0)], id="its spinning peer waits for a rank at rest"),
        pytest.param((0, 1), False, [], id="a rank evaluates on its processor: none"),
    ],
)
def test_devices_that_only_spin_do_nothing(spin, both_devices, expected):
    job, engine = on_devices()
    spinning_devices = devices(job, 60, **SPINS) if both_devices else one_idle_one_spins(job)
    found = opened(engine, in_order(spinning(quiet(job, 60), *spin), spinning_devices))
    assert [(a.rank, a.time - job.time) for a in found] == expected


@pytest.mark.parametrize("idle", [False, True])
def test_a_call_that_keeps_the_gil_hangs_only_when_it_does_nothing(idle):
    job, engine = on_cpu()
    held = event(job, 1, "stopped", 10.0, silent_reason="holds the GIL")
    looks = [r for r in quiet(job, 60) if idle and r.rank == 1]
    found = opened(engine, in_order([held], looks, [Clock(job.time + 120)]))
    assert [(a.rank, a.time - job.time) for a in found][:1] == ([(1, 20.0)] if idle else [])
    assert all("its process does not respond" in anomaly.summary for anomaly in found)


def test_the_long_limit_of_the_warm_up_is_over_with_it_also_after_a_long_silence():
    job, engine = running(steps=2)
    assert opened(engine, [Clock(job.time + 10)]) == []
    job.time += 10
    assert opened(engine, job.steps(40)) == []
    (hang,) = opened(engine, [Clock(job.time + 500)])
    assert hang.time - job.time == pytest.approx(1.15 * 10, abs=0.1)


def test_records_out_of_order_bring_the_deadline_nearer():
    job, engine = running()
    back = [Step(job.time - 5.0, "llama", rank, 200, 0.05) for rank in (0, 1)]
    assert opened(engine, back) == []
    (hang,) = opened(engine, [Clock(job.time + 60)])
    assert 3.0 <= hang.time - job.time < 8.0


def test_what_a_program_survives_is_over_and_a_later_crash_is_one():
    job, engine = running()
    failures = [event(job, 1, "oom", detail="1 failed allocations"), event(job, 0, "exception")]
    first = opened(engine, failures)
    job.step_s = 0.5
    opened(engine, job.steps(2000))
    assert engine.active == ()
    later = opened(engine, [event(job, 1, "exception", type="ValueError", detail="no")])
    assert [(a.kind, a.rank) for a in (*first, *later)] == [("oom", 1), ("crash", 1)]
    assert later[0].summary == "rank 1 raised ValueError: no"
