"""Detectors, one file a kind: records in, verdicts out.

- base: what a detector is, what it sees and what it says
- job_steps: joins the ranks' steps into steps of the job; capture_windows: what to look away from
- level: block medians, baseline, persistence; rank_levels: the same for a value of each rank
- step_regression, data_stall, straggler, hang, crash: the kinds
"""

from __future__ import annotations

from collections.abc import Callable

from warpwatch.daemon.config import Config
from warpwatch.daemon.detectors.base import Detector
from warpwatch.daemon.detectors.crash import Crash
from warpwatch.daemon.detectors.data_stall import DataStall
from warpwatch.daemon.detectors.hang import Hang
from warpwatch.daemon.detectors.step_regression import StepRegression
from warpwatch.daemon.detectors.straggler import Straggler

# In the order in which they judge a record: a cause comes before what it explains.
DETECTORS: dict[str, Callable[[Config], Detector]] = {
    "crash": lambda config: Crash(config.detectors.crash),
    "hang": lambda config: Hang(config.detectors.hang, config.triggers.capture_timeout_s),
    "straggler": lambda config: Straggler(config.detectors.straggler),
    "data_stall": lambda config: DataStall(config.detectors.data_stall),
    "step_regression": lambda config: StepRegression(config.detectors.step_regression),
}


def build(config: Config) -> list[Detector]:
    """The enabled detectors."""
    return [
        make(config) for kind, make in DETECTORS.items() if getattr(config.detectors, kind).enabled
    ]
