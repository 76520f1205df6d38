"""The worst moment of an anomaly, and the effects of a device on its job as one anomaly."""

from collections.abc import Iterator

import pytest

from tests.cases import cases
from tests.detection.gpus import Metrics, Node, key
from tests.detection.life import Life
from tests.detection.streams import Job, detection, lives
from warpwatch_telemetry.anomalies import DEVICE_KINDS
from warpwatch_telemetry.records import Record

CASES = cases(__file__)


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
        assert engine.register.suppressed_counts["straggler", "thermal_throttle"] >= 1
        assert engine.active == ()
