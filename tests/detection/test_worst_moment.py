"""The worst moment of an anomaly, and the effects of a device on its job as one anomaly."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases import cases
from tests.detection.gpus import Metrics, Node, key
from tests.detection.life import Life
from tests.detection.streams import EPOCH_S, Job, detection, fed, lives
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Worst
from warpwatch_telemetry.records import Record

CASES = cases(__file__)


def slower(life: Life, at: float, percent: int, step: int) -> Any:
    """A regression of steps that took 1 s."""
    said = f"steps take {percent} % longer since step 400"
    (changed,) = life.found(
        "step_regression", at, said, step=step, value=1 + percent / 100, baseline=1.0
    )
    return changed


def test_what_it_was_at_its_worst_stays_when_it_is_over():
    life = Life()
    for at, percent, step in ((0, 25, 420), (60, 62, 1200), (120, 40, 1300), (180, 4, 1400)):
        slower(life, at, percent, step)
    (ended,) = life.fine("step_regression", 200)
    assert ended.summary == "steps take 62 % longer since step 400"
    assert (ended.value, ended.baseline) == (1.62, 1.0)
    assert ended.worst == Worst(EPOCH_S + 60, ended.summary, 1200, 1.62, 1.0)
    # When it was raised stays too.
    assert (ended.time, ended.step) == (EPOCH_S, 420)
    assert list(life.register.history) == [ended]


def test_while_it_lasts_the_newest_is_said_and_that_it_recovers():
    life = Life()
    slower(life, 0, 62, 1200)
    lasting = slower(life, 60, 40, 1300)
    assert (lasting.summary, lasting.value) == ("steps take 40 % longer since step 400", 1.4)
    recovering = slower(life, 120, 4, 1400)
    assert recovering.summary == (
        "recovering: now 4 % longer; at its worst (step 1200) steps take 62 % longer since step 400"
    )
    assert recovering.value == 1.04
    again = slower(life, 180, 50, 1500)
    assert again.summary == "steps take 50 % longer since step 400"
    assert (lasting.worst, again.worst) == (recovering.worst, recovering.worst)


def test_what_comes_back_within_the_grace_remembers_what_it_was_before():
    life = Life()
    slower(life, 0, 62, 1200)
    life.fine("step_regression", 60)
    assert slower(life, 90, 50, 1300).summary == "steps take 50 % longer since step 400"
    (ended,) = life.fine("step_regression", 120)
    assert (ended.summary, ended.reopened) == ("steps take 62 % longer since step 400", 1)


def test_what_comes_back_smaller_does_not_recover():
    life = Life()
    life.found("hang", 0, "no step for 140 s", value=140.0, baseline=1.0)
    life.fine("hang", 60)
    (again,) = life.found("hang", 120, "no step for 30 s", value=30.0, baseline=1.0)
    assert (again.summary, again.reopened) == ("no step for 30 s", 1)


def test_a_device_says_what_it_did_to_its_job_at_the_worst():
    life = Life()
    life.found("thermal_throttle", 0, "throttled by heat", device="GPU-3", value=0.4)
    for at, percent in ((5, 24), (15, 31), (25, 2)):
        said = f"rank 3 computes {percent} % longer"
        life.found("straggler", at, said, rank=3, value=1 + percent / 100, baseline=1.0)
    life.found("thermal_throttle", 30, "throttled 0 % of the time", device="GPU-3", value=0.0)
    (recovering,) = life.register.active
    assert recovering.summary == (
        "recovering: now throttled 0 % of the time; at its worst throttled by heat; "
        "in llama rank 3 computes 31 % longer"
    )
    (ended,) = life.fine("thermal_throttle", 40, device="GPU-3")
    assert ended.effects == ("in llama rank 3 computes 31 % longer",)
    assert ended.summary == "throttled by heat; in llama rank 3 computes 31 % longer"


# Value and baseline of the worse and of the better one.
@pytest.mark.parametrize(("kind", "worse", "better"), CASES["worse"])
@pytest.mark.parametrize("worse_first", [False, True])
def test_what_is_worse_depends_on_the_kind(kind, worse, better, worse_first):
    life = Life()
    about = {"device": "GPU-3"} if kind in DEVICE_KINDS else {}
    order = [("worse", worse), ("better", better)]
    for at, (said, (value, baseline)) in enumerate(order if worse_first else reversed(order)):
        life.found(kind, at, said, value=value, baseline=baseline, **about)
    (one,) = life.register.active
    assert (one.worst.summary, one.worst.value) == ("worse", worse[0])


def test_events_add_up_so_that_their_newest_word_is_kept():
    life = Life()
    life.found("ecc_uncorrectable", 0, "1 error", device="GPU-3", value=1.0, baseline=0.0)
    life.found("ecc_uncorrectable", 5, "1 more since", device="GPU-3", value=1.0, baseline=9.0)
    life.found("crash", 0, "rank 1 raised", rank=1)
    life.found("crash", 3, "rank 1 raised; 2 more followed", rank=1)
    ecc, crash = life.register.active
    assert (ecc.summary, crash.summary) == ("1 more since", "rank 1 raised; 2 more followed")
    assert life.register.expire(EPOCH_S + 1000)[1].anomaly.summary == crash.summary


def training(throttled_first_s: float) -> Iterator[Record]:
    """Four ranks on four GPUs; GPU 3 gets hot, and its rank slow before or after."""
    node, job = Node(gpus=4, broken=3), Job(ranks=4, step_s=0.5, noise=0.02)
    slow_from, hot_from, well_from = 200.0, 200.0 - throttled_first_s, 320.0
    throttled_s = 0.0

    def hot(_: float, values: Metrics) -> Metrics:
        nonlocal throttled_s
        if hot_from <= node.time - begun < well_from:
            throttled_s += 1.0
        return {key("throttle_seconds_total", "hw_thermal"): throttled_s}

    def slow(_: int, rank: int) -> float:
        at = job.time - begun
        return 0.15 if rank == 3 and slow_from <= at < well_from else 0.0

    begun = job.time
    yield from node.seen()
    steps = job.steps(10_000, compute=slow)
    step = next(steps)
    for reading in node.readings(450, hot):
        while step.time <= reading.time:
            yield step
            step = next(steps)
        yield reading


@pytest.mark.parametrize(("throttled_first_s", "restart_every"), [(60.0, 701), (-60.0, 0)])
def test_a_hot_gpu_and_its_slow_rank_are_one_anomaly_at_last(throttled_first_s, restart_every):
    engine = detection()
    reported = lives(engine, training(throttled_first_s), restart_every)
    kinds = [life[0] for life in reported]
    assert kinds == (["straggler"] if throttled_first_s < 0 else []) + ["thermal_throttle"]
    assert [life[2] for life in reported] == [3] * len(reported)
    assert all(life[4] is not None for life in reported)
    if restart_every == 0:
        ended = next(one for one in engine.history if one.kind == "thermal_throttle")
        assert "; in llama rank 3 computes" in ended.summary
        assert engine.suppressed_counts["straggler", "thermal_throttle"] >= 1
        assert engine.active == ()


XID, ECC, ROWS = (
    key("xid_errors_total", "94"),
    key("ecc_errors_total", "uncorrected"),
    key("row_remap_pending"),
)


@pytest.mark.parametrize("order", list(itertools.permutations((XID, ECC, ROWS)))[::2])
def test_a_memory_error_that_is_xid_ecc_and_row_remap_is_one_anomaly_at_last(order):
    node, engine = Node(), detection()
    fed(engine, [*node.seen(), *node.readings(150)])
    begins = {name: 5.0 + 2 * number for number, name in enumerate(order)}

    def broken(since_s: float, _: Metrics) -> Metrics:
        return {name: 1.0 for name, begin in begins.items() if since_s >= begin}

    # The row waits for a reset for longer than an event is held.
    fed(engine, node.readings(1200, broken, interval_s=4.0))
    (anomaly,) = engine.active
    assert (anomaly.kind, anomaly.severity) == ("xid", "critical")
    assert "new uncorrectable memory error" in anomaly.summary
    assert "waits for the GPU's next reset" in anomaly.summary
    assert all(before.explained_by is not None for before in engine.history)


def test_an_xid_of_something_else_explains_no_memory_error():
    node, engine = Node(), detection()
    fed(engine, [*node.seen(), *node.readings(150)])
    fed(engine, node.readings(20, lambda *_: {key("xid_errors_total", "31"): 1.0, ECC: 1.0}))
    assert {one.kind for one in engine.active} == {"xid", "ecc_uncorrectable"}
