"""What the main panel of *Training job* makes of a training that becomes 8 % slower.

Exporter and Prometheus are real; the training does two hundred steps between two scrapes.
"""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.dashboards.expressions import dashboards, expressions
from tests.dashboards.monitoring.prometheus import Prometheus, prometheus
from tests.dashboards.monitoring.web import Web
from tests.exporters.states import TIME, rank
from tests.loop.node import poll
from warpwatch_exporters.prometheus import Options, render
from warpwatch_telemetry.profiles import Profile
from warpwatch_telemetry.state import STEP_DURATION_BOUNDS_S, Histogram, State

pytestmark = pytest.mark.slow

STEP_S, NOISE, SLOWER, STEPS = 0.175, 0.05, 1.08, 200
WINDOW_S, SCRAPES = 2, 12


class Training:
    def __init__(self, profile: Profile) -> None:
        self.step_s, self.scrapes = STEP_S, 0
        self.job = f"llama-{profile}"
        self._options = Options(profile=profile)
        self._noise = random.Random(0)
        self._counts = [0] * (len(STEP_DURATION_BOUNDS_S) + 1)
        self._sum = 0.0

    def page(self) -> bytes:
        for _ in range(STEPS):
            duration_s = self._noise.gauss(self.step_s, NOISE * self.step_s)
            self._counts[bisect.bisect_left(STEP_DURATION_BOUNDS_S, duration_s)] += 1
            self._sum += duration_s
        self.scrapes += 1
        known = rank(0, job=self.job, durations=Histogram(tuple(self._counts), self._sum))
        return render(State(TIME, "1", "h", ranks=(known,)), self._options)


def settled(trainings: Sequence[Training], server: Prometheus) -> list[dict[str, float]]:
    """What the panel's lines say of each once they know nothing but steps as they are now."""
    wanted = [training.scrapes + SCRAPES for training in trainings]
    poll(
        lambda: all(one.scrapes > count for one, count in zip(trainings, wanted, strict=True)),
        "steps of one length",
    )
    return [_lines(training.job, server) for training in trainings]


def _lines(job: str, server: Prometheus) -> dict[str, float]:
    values = {"__rate_interval": f"{WINDOW_S}s", "job": job}
    shown = expressions(dashboards()["training-job"], values)
    asked = [one.promql for one in shown if re.search(": Step time [ABC]$", one.where)][:3]
    answers: list[Any] = poll(
        lambda: all(found := [server.query(promql) for promql in asked]) and found, "answers"
    )
    values_s = (float(answer[0]["value"][1]) for answer in answers)
    return dict(zip(("mean", "p50", "p99"), values_s, strict=True))


def test_steps_that_take_8_percent_longer_are_seen(tmp_path: Path) -> None:
    trainings = Training("default"), Training("full")
    with ExitStack() as stack:
        webs = [stack.enter_context(Web({"/metrics": one.page}).serving()) for one in trainings]
        targets: dict[int, dict[str, str]] = {web.port: {} for web in webs}
        server = stack.enter_context(prometheus(tmp_path, targets, interval="250ms"))
        before = settled(trainings, server)
        for training in trainings:
            training.step_s *= SLOWER
        after = settled(trainings, server)
    for old, new in zip(before, after, strict=True):
        assert old["mean"] == pytest.approx(STEP_S, rel=0.01)
        assert new["mean"] / old["mean"] == pytest.approx(SLOWER, rel=0.01)
    coarse_rise, fine_rise = (
        new["p50"] / old["p50"] for old, new in zip(before, after, strict=True)
    )
    # Between 100 and 250 ms there is no border by default.
    assert coarse_rise == pytest.approx(1, abs=0.01)
    assert fine_rise > 1.04
