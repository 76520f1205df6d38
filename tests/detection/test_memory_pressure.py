"""memory_pressure: allocation retries, full devices and full hosts."""

from tests.detection.streams import Job, alone, fed, opened, restart
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import Clock, DeviceReading, End, RankEvent

GB = 10**9


def running() -> tuple[Job, Detection]:
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), alone("memory_pressure")
    assert opened(engine, [*job.seen(), *job.steps(100)]) == []
    return job, engine


def allocator(job: Job, after_s: float, rank: int = 1, **said: int) -> RankEvent:
    return RankEvent(job.time + after_s, "llama", rank, "memory", said)


def device(job: Job, after_s: float, used: float, rank: int = 1) -> DeviceReading:
    metrics: dict[SeriesKey, float] = {
        ("device_memory_used_bytes", ()): used * GB,
        ("device_memory_total_bytes", ()): 81.0 * GB,
        ("device_memory_reserved_bytes", ()): 1.0 * GB,
    }
    return DeviceReading(job.time + after_s, f"GPU-{rank}", metrics)


def host(job: Job, after_s: float, available: float) -> RankEvent:
    said = {"available_bytes": available * GB, "limit_bytes": 100 * GB}
    return RankEvent(job.time + after_s, "llama", 0, "process", said)


def test_a_retried_allocation_is_found_and_over_after_five_calm_minutes(golden_report):
    job, engine = running()
    assert opened(engine, [allocator(job, 1, allocation_retries=3)]) == []
    found = opened(engine, [allocator(job, 2, allocation_retries=5)])
    assert [(a.kind, a.severity, a.rank, a.device, a.value) for a in found] == [
        ("memory_pressure", "warning", 1, "GPU-1", 2.0)
    ]
    golden_report(engine)
    opened(engine, [allocator(job, 200, allocation_retries=5), Clock(job.time + 301)])
    assert [a.end_time for a in fed(engine, [Clock(job.time + 303)])] == [job.time + 302]


def test_retries_of_the_first_steps_and_a_successors_count_are_no_news():
    job, engine = Job(ranks=2), alone("memory_pressure")
    opened(engine, [*job.seen(), *job.steps(5), allocator(job, 0, allocation_retries=0)])
    assert opened(engine, [allocator(job, 0, allocation_retries=9), *job.steps(100)]) == []
    assert opened(engine, [allocator(job, 0, allocation_retries=0)]) == []


def test_a_device_that_is_full_for_half_a_minute_is_found_and_closed(golden_report):
    job, engine = running()
    assert opened(engine, [device(job, s, 79.0) for s in range(30)]) == []
    restart(engine)
    found = opened(engine, [device(job, 30, 79.0)])
    assert [(a.rank, a.device, a.baseline) for a in found] == [(1, "GPU-1", 0.97)]
    assert found[0].summary == "the device of rank 1 is 99% full"
    assert [a.end_time for a in fed(engine, [device(job, 31, 77.7)])] == [None]
    assert [a.end_time for a in fed(engine, [device(job, 32, 75.0)])] == [job.time + 32]
    golden_report(engine)


def test_a_short_peak_is_no_pressure():
    job, engine = running()
    peaks = [device(job, s, 79.5 if s % 20 < 15 else 70.0) for s in range(200)]
    assert opened(engine, peaks) == []


def test_a_device_full_of_what_the_allocator_keeps_for_no_use_is_no_pressure():
    job, engine = running()
    opened(engine, [allocator(job, 0, peak_allocated_bytes=40 * GB, reserved_bytes=78 * GB)])
    assert opened(engine, [device(job, s, 79.5) for s in range(100)]) == []
    used = allocator(job, 101, peak_allocated_bytes=75 * GB, reserved_bytes=78 * GB)
    assert [a.rank for a in opened(engine, [used])] == [1]


def test_a_control_group_near_its_limit_is_found_of_the_rank(golden_report):
    job, engine = running()
    found = opened(engine, [host(job, s, 3.0) for s in range(0, 40, 2)])
    assert [(a.kind, a.rank) for a in found] == [("memory_pressure", 0)]
    golden_report(engine)
    opened(engine, [host(job, 42, 20.0)])
    assert engine.active == ()


def test_several_ranks_that_are_short_are_one_anomaly_of_the_job(golden_report):
    job, engine = running()
    both = [device(job, s, 79.0, rank) for s in range(40) for rank in (0, 1)]
    opened(engine, both)
    (now,) = engine.active
    assert (now.rank, now.summary) == (None, "the device of rank 0 is 99% full; 1 more ranks alike")
    golden_report(engine)
    fed(engine, [End(job.time + 41, "llama", 0)])
    assert [(now.rank, now.summary) for now in engine.active] == [
        (1, "the device of rank 1 is 99% full")
    ]
