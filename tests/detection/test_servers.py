"""Faults of inference servers are found by what iterations had to do, and healthy loads are not."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.servers import EPOCH_S, Fault, ServerModel, SimulatedServer
from tests.cases import cases
from tests.detection.streams import alone, detection, joined, kinds_of, opened, restart
from warpwatch_detection.detector import WARMUP_STEPS, JobIteration
from warpwatch_detection.engine import Detection
from warpwatch_detection.signals.samples import IterationSignal
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Clock, End, RankEvent, RankSeen, Record, Serve, Step

# Requests all the time, so that an hour is enough.
BUSY = ServerModel(rate=1.5, noise=0.03, bursts_per_day=0.0)
NOON_S = 12 * 3600.0


def server(model: ServerModel = BUSY, fault: Fault | None = None, seed: int = 1) -> SimulatedServer:
    """A server at noon, with a fault whose times count from then."""
    if fault is not None:
        fault = replace(fault, begin_s=fault.begin_s + NOON_S, end_s=fault.end_s + NOON_S)
    simulated = SimulatedServer(model, seed, fault)
    simulated.start(NOON_S)
    return simulated


def after(found: Iterable[Anomaly], seconds: float) -> list[tuple[str, int | None]]:
    """Return kinds and ranks; none is opened before the fault."""
    found = list(found)
    assert [one for one in found if one.time < EPOCH_S + NOON_S + seconds] == []
    return kinds_of(found)


def test_iterations_that_take_longer_for_the_same_work_are_a_regression():
    engine = detection()
    found = opened(engine, server(fault=Fault(3000, slower=1.1)).records(3600))
    assert ("step_regression", None) in after(found, 3000)
    (regression, *_) = [one for one in found if one.kind == "step_regression"]
    assert regression.value is not None and regression.baseline is not None
    assert "% longer for the same work since iteration" in regression.summary
    assert regression.value == pytest.approx(1.1 * regression.baseline, rel=0.03)


def test_a_level_that_lasts_is_the_new_normal_at_any_load():
    engine, load = alone("step_regression"), server(fault=Fault(3000, slower=1.3))
    found = opened(engine, load.records(3500))
    assert after(found, 3000) == [("step_regression", None)]
    assert (opened(engine, load.records(1500)), engine.active) == ([], ())


@pytest.mark.parametrize("seed", [1, 2])
def test_a_load_that_rises_and_falls_is_nothing(seed):
    load = server(replace(BUSY, rate=0.4, bursts_per_day=100.0), Fault(2000, 3000, load=2.5), seed)
    assert opened(detection(), load.records(5000)) == []


def test_a_small_kv_cache_thrashes():
    model = replace(BUSY, prompt_tokens=60.0, output_tokens=600.0, rate=0.4)
    found = opened(detection(), server(model, Fault(1500, cache=0.04)).records(2400))
    assert ("kv_thrash", None) in after(found, 1500)
    (thrash, *_) = [one for one in found if one.kind == "kv_thrash"]
    assert thrash.summary.startswith("the KV cache is too small for the load: ")


def test_a_blocked_front_end_is_named_as_the_cause():
    engine, load = detection(), server(fault=Fault(3000, front_end_s=0.2))
    found = opened(engine, load.records(2900))
    restart(engine)
    found += opened(engine, load.records(700))
    assert after(found, 3000)[0] == ("latency_regression", 0)
    assert found[0].summary.endswith(
        "; cause: the front end, since work, ranks, queue and KV cache do not explain it"
    )


def seconds(count: int, first: int = 0, **fields: Any) -> Iterator[Serve]:
    for number in range(first, first + count):
        yield Serve(EPOCH_S + number, "chat", **{"interval_s": 1.0, **fields})


def seen(rank: int = 0, count: int = 1) -> RankSeen:
    return RankSeen(EPOCH_S, "chat", rank, count, kind="serve")


DECODING: dict[str, Any] = {"iterations": {"decode": (10, 0.9)}, "running": 4}
HEALTHY = DECODING | {"inter_token": {0: 40}, "inter_token_s": 3.6}
SLOW = DECODING | {"inter_token": {0: 40}, "inter_token_s": 7.2}


def test_an_anomaly_that_explains_a_latency_names_it():
    engine = detection()
    slow = seconds(60, 300, **SLOW, preemptions=1)
    assert kinds_of(opened(engine, [seen(), *seconds(300, **HEALTHY), *slow])) == [
        ("kv_thrash", None)
    ]
    (thrash,) = engine.active
    assert "; the time between tokens is 100 % longer than the iterations" in thrash.summary


DECODES: dict[str, Any] = {
    "iterations": {"decode": (50, 0.9)},
    "generated_tokens": 50,
    "running": 1,
}


SILENCES = cases(__file__)


def told(at: float, rank: int | None = None, what: str = "") -> Record:
    """Return the record of a row of servers.yaml."""
    if rank is None:
        return Clock(EPOCH_S + at)
    if what == "step":
        return Step(EPOCH_S + at, "chat", rank, 0, 0.1, work_class="decode")
    if what == "end":
        return End(EPOCH_S + at, "chat", rank)
    event, _, reason = what.partition(": ")
    return RankEvent(EPOCH_S + at, "chat", rank, event, {"silent_reason": reason})


@pytest.mark.parametrize("name", SILENCES)
def test_silence_is_a_hang_while_requests_are_in_flight(name):
    rows, hangs, lasting = SILENCES[name]
    engine = alone("hang")
    records: list[Record] = [seen(0, 2), seen(1, 2), *seconds(60, **DECODES)]
    for row in rows:
        records += seconds(*row[:2], **row[2]) if isinstance(row[-1], dict) else [told(*row)]
    assert kinds_of(opened(engine, records)) == [("hang", rank) for rank in hangs]
    assert kinds_of(engine.active) == [("hang", rank) for rank in lasting]


def ranks(slow: float, summaries: bool, count: int = 900) -> Iterator[Record]:
    """Two ranks; from the middle on the second takes ``slow`` times as long, the first waits."""
    yield from (seen(0, 2), seen(1, 2))
    for number in range(count):
        own_s = 0.08 * (slow if number >= count // 2 else 1.0) * (1 + 0.02 * (number % 3))
        took_s = own_s + 0.01
        time = EPOCH_S + (number if summaries else number * took_s)
        for rank in range(2):
            comm_s = 0.01 if rank else took_s - 0.08 * (1 + 0.02 * (number % 3))
            if summaries:
                iterations: Any = {"decode": (10, 10 * took_s)}
                yield Serve(
                    time, "chat", rank, iterations=iterations, comm_s=10 * comm_s, running=8
                )
            else:
                yield Step(
                    time, "chat", rank, number, took_s, phases_s={"comm": comm_s},
                    work_class="decode", decode_requests=8, kv_tokens=5000,
                )  # fmt: skip


@pytest.mark.parametrize("summaries", [False, True], ids=["iterations", "summaries"])
def test_a_slow_rank_is_a_straggler(summaries):
    """A fleet gets summaries only."""
    found = opened(alone("straggler"), ranks(1.3, summaries))
    assert kinds_of(found) == [("straggler", 1)]
    assert opened(alone("straggler"), ranks(1.0, summaries)) == []


@pytest.mark.parametrize(
    ("kind", "records"),
    [
        ("straggler", list(ranks(1.3, summaries=True))),
        ("step_regression", list(ranks(1.3, summaries=True, count=1200))),
        ("latency_regression", [seen(), *seconds(300, **HEALTHY), *seconds(60, 300, **SLOW)]),
    ],
)
def test_a_fault_of_a_server_is_over_after_ten_minutes_without_load(kind, records):
    engine, end = alone(kind), int(records[-1].time - EPOCH_S) + 1
    (found,) = opened(engine, records)
    assert found.kind == kind
    if kind == "step_regression":
        assert found.baseline == pytest.approx(0.0916, rel=0.01)
    for first, count, active in ((0, 595, 1), (595, 10, 0)):
        assert opened(engine, seconds(count, end + first)) == []
        assert len(engine.active) == active


def test_one_giant_prompt_is_nothing():
    def records() -> Iterator[Record]:
        yield seen()
        for number in range(3000):
            giant = number == 2500
            took_s = 40.0 if giant else 0.1
            yield Step(
                EPOCH_S + 0.1 * number + 40.0 * (number >= 2500), "chat", 0, number, took_s,
                work_class="mixed" if giant else "decode",
                prefill_tokens=200_000 if giant else 0, decode_requests=8, kv_tokens=5000,
            )  # fmt: skip

    assert opened(detection(), records()) == []


def test_seconds_of_an_unknown_job_are_ignored():
    engine: Detection = detection()
    assert opened(engine, seconds(200, running=3, preemptions=5)) == []
    assert all(not getattr(d.state, "jobs", {}) for d in engine.runner.detectors)


def test_seconds_with_impossible_sums_and_such_steps_are_ignored():
    engine = alone("queue_growth", "hang")
    for name in ("first_token", "inter_token", "queue", "comm", "idle", "interval"):
        opened(engine, [seen(), *seconds(2, 20, waiting=9, **{f"{name}_s": float("inf")})])
    opened(
        engine, seconds(5, 20, running=1, iterations={"decode": (1, 1e308), "mixed": (1, 1e308)})
    )
    opened(engine, (Step(EPOCH_S, "chat", 0, 1, float(took_s)) for took_s in (-1, "inf", "nan")))
    assert all(not detector.state.jobs for detector in engine.runner.detectors)


def test_seconds_of_a_server_are_joined_into_their_mean_iterations():
    records = seconds(3, **DECODES, kv_usage=0.25)
    found = [one for one in joined(records) if isinstance(one, JobIteration)]
    assert [(one.index, one.step, one.kv_tokens) for one in found] == [(0, 50, 250), (1, 100, 250)]


def test_the_times_of_a_servers_first_iterations_are_not_learned():
    signal, samples = IterationSignal(), []
    for index in range(60):
        took_s = 0.3 if index < WARMUP_STEPS else 0.1
        about: dict[str, Any] = {"compute_s": {}, "data_wait_s": {}, "decode_requests": 8}
        job = JobId("", "chat", "")
        seen = JobIteration(EPOCH_S, job, index, index, took_s, took_s, **about)
        samples.append(signal.add(seen, learns=True))
    assert {round(one, 6) for one in samples if one is not None} == {0.0}
