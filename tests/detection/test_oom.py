"""oom: a rank without memory is one anomaly, and no crash beside it."""

from __future__ import annotations

from tests.detection.streams import Job, alone, opened
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.records import Clock, RankEvent

OUT = "CUDA out of memory. Tried to allocate 2.00 GiB"


def running(ranks: int = 4) -> tuple[Job, Detection]:
    job, engine = Job(ranks=ranks, step_s=0.5, noise=0.02), alone("crash", "oom", "hang")
    assert opened(engine, [*job.seen(), *job.steps(100)]) == []
    return job, engine


def event(job: Job, rank: int, name: str, after_s: float = 0.0, **detail: object) -> RankEvent:
    return RankEvent(job.time + after_s, "llama", rank, name, detail)


def test_a_rank_without_device_memory_is_one_anomaly_whatever_follows():
    job, engine = running()
    found = opened(
        engine,
        [
            event(job, 2, "oom", 0.0, detail=OUT),
            event(job, 2, "oom", 0.1, detail="1 failed allocations on the device"),
            event(job, 2, "exception", 0.1, type="OutOfMemoryError", detail=OUT),
            event(job, 2, "died", 0.5),
            event(job, 0, "exception", 0.6, type="RuntimeError", detail="gloo: closed by peer"),
            event(job, 1, "died", 0.7),
            Clock(job.time + 60),
        ],
    )
    assert [(a.kind, a.severity, a.rank, a.device) for a in found] == [
        ("oom", "warning", 2, "GPU-2")
    ]
    assert engine.active[0].summary == f"rank 2 ran out of memory: {OUT}; 2 more followed"


def test_an_exception_for_want_of_memory_alone_is_an_oom_too():
    job, engine = running()
    found = opened(engine, [event(job, 1, "exception", type="MemoryError"), Clock(job.time + 60)])
    assert [(a.kind, a.rank) for a in found] == [("oom", 1)]


def test_a_rank_killed_by_the_kernel_for_want_of_memory_is_an_oom():
    job, engine = running()
    found = opened(
        engine,
        [
            event(
                job, 0, "exception", 0.1, type="RuntimeError", detail="Connection closed by peer"
            ),
            event(job, 3, "died", 0.5, oom_kill=True),
            Clock(job.time + 60),
        ],
    )
    assert [(a.kind, a.rank) for a in found] == [("oom", 3)]
    assert found[0].summary == (
        "rank 3 was killed by the kernel after step 99: its control group ran out of memory; "
        "1 more followed"
    )


def test_what_a_program_survives_is_over_and_a_later_crash_is_one():
    job, engine = running()
    first = opened(engine, [event(job, 1, "oom", detail="1 failed allocations on the device")])
    opened(engine, job.steps(2000))
    assert engine.active == ()
    later = opened(engine, [event(job, 1, "exception", type="ValueError", detail="no")])
    assert [(a.kind, a.rank) for a in (*first, *later)] == [("oom", 1), ("crash", 1)]
