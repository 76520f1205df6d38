"""A log of records through the engine: made ones, and those that daemons recorded."""

from collections.abc import Iterator
from pathlib import Path

from tests.detection.streams import EPOCH_S, Job
from warpwatch_daemon.cli.replay import LogReader, read_lines
from warpwatch_detection.replay import LogReplay
from warpwatch_telemetry.records import End, Record


def slow_rank(steps: int = 200) -> Iterator[Record]:
    job = Job(ranks=2, step_s=0.5, noise=0.02)
    yield from job.seen()
    yield from job.steps(300)
    yield from job.steps(steps, compute=lambda _, rank: 0.2 if rank == 1 else 0.0)
    yield End(job.time, "llama")


def test_a_replay_stops_before_a_step_or_a_time() -> None:
    log = slow_rank()
    assert [(a.kind, a.rank) for a in LogReplay().run(log)] == [("straggler", 1)]
    assert list(LogReplay().run(log, until=300)) == []
    assert list(LogReplay().run(log, until=EPOCH_S + 50)) == []


def test_what_a_replay_found_is_kept_with_its_end() -> None:
    replay = LogReplay()
    (found,) = list(replay.run(slow_rank()))
    assert replay.anomalies[found.id].end_time is not None
    assert found.end_time is None


def test_the_status_of_an_ended_job_is_that_at_its_end() -> None:
    replay = LogReplay(explain=True)
    list(replay.run(slow_rank()))
    found = {kind: status for kind, status in replay.statuses() if status.answer == "found"}
    assert found.keys() == {"straggler"}
    assert (found["straggler"].job, found["straggler"].rank) == ("llama", 1)


def test_what_a_cause_explains_is_found_as_suppressed() -> None:
    job = Job(ranks=2, step_s=0.5, noise=0.02)
    records = [*job.steps(300), *job.steps(100, wait=lambda *_: 0.3)]
    records += job.steps(100, wait=lambda *_: 0.3, compute=lambda *_: 0.2)
    replay = LogReplay(explain=True)
    assert [anomaly.kind for anomaly in replay.run(records)] == ["data_stall"]
    reported = {(one.kind, one.cause) for one in replay.suppressed()}
    assert ("step_regression", "data_stall") in reported


LOGS = Path(__file__).with_name("logs")


def found(log: str) -> list[tuple[str, int | None]]:
    records = LogReader().records(read_lines(LOGS / log))
    return [(anomaly.kind, anomaly.rank) for anomaly in LogReplay().run(records)]


def test_faults_one_after_the_other_are_found_once_each() -> None:
    # A leak of half a minute besides is too short to be judged.
    assert found("seven_faults.jsonl.gz") == [
        ("data_stall", 2),
        ("step_regression", None),
        ("straggler", 1),
        ("gc_pause", 1),
        ("hang", 2),
        ("crash", 3),
    ]


def test_the_rank_that_raised_is_found_and_not_those_that_lost_it() -> None:
    assert found("exception.jsonl.gz") == [("crash", 1)]


def test_of_minutes_of_healthy_training_on_a_busy_machine_nothing_is_found() -> None:
    assert found("healthy.jsonl.gz") == []


def test_what_ended_says_what_it_was_at_its_worst() -> None:
    replay = LogReplay()
    assert (
        len(list(replay.run(LogReader().records(read_lines(LOGS / "seven_faults.jsonl.gz"))))) == 6
    )
    stall, regression, straggler, *_ = replay.anomalies.values()
    assert stall.summary == "rank 2 waits for data 18 % of the time instead of 2 %, since step 296"
    assert regression.summary.startswith("steps take 20 % longer since step 440")
    assert straggler.summary == "rank 1 computes 25 % longer than its 3 peers since step 512"
    assert (straggler.worst.step, straggler.worst.value) == (539, straggler.value)


def test_only_a_kv_cache_that_is_too_small_is_found_in_recorded_servers() -> None:
    """vLLM 0.32.0 with a tiny model on two busy cores, recorded by an agent.

    The first log has idle time, decoding, long prompts and rare requests; the second one 24
    requests at once with 20 blocks of KV cache.
    """
    assert found("vllm_phases.jsonl.gz") == []
    assert found("vllm_thrash.jsonl.gz") == [("kv_thrash", None)]
