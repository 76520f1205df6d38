"""A lasting level shift of the job's step time that no single rank and no input wait explains."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from warpwatch.daemon.config import StepRegressionConfig
from warpwatch.daemon.detectors.base import Fine, Found, JobStep, Observation, Timeless, Verdict
from warpwatch.daemon.detectors.level import Baseline, BlockSpan, Persistence, median

# A job that got faster for this many blocks has a new normal; nobody needs to be told.
FASTER_BLOCKS = 15


class _Job:
    def __init__(self, config: StepRegressionConfig) -> None:
        self.values: list[float] = []
        self.span = BlockSpan(config.block_steps, config.block_s)
        self.baseline = Baseline(config.baseline_blocks, config.ready_blocks)
        self.state = Persistence(config.hold_blocks, config.hold_s)
        self.recent: deque[float] = deque(maxlen=FASTER_BLOCKS)
        self.faster_blocks = 0
        self.found_time = 0.0


class StepRegression(Timeless):
    kind = "step_regression"
    reads = (JobStep,)

    def __init__(self, config: StepRegressionConfig) -> None:
        self._config = config
        self._jobs: dict[str, _Job] = {}

    def observe(self, seen: Observation) -> Iterable[Verdict]:
        assert isinstance(seen, JobStep)
        if seen.index < self._config.warmup_steps:
            return ()
        job = self._jobs.get(seen.job)
        if job is None:
            job = self._jobs[seen.job] = _Job(self._config)
        job.values.append(seen.common_s)
        if not job.span.add(seen.step, seen.duration_s):
            return ()
        level = median(job.values)
        job.values.clear()
        job.recent.append(level)
        verdict = self._judge(job, level, seen)
        job.span.restart()
        return verdict

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)

    def _judge(self, job: _Job, level: float, seen: JobStep) -> Iterable[Verdict]:
        baseline = job.baseline
        if not baseline.ready:
            baseline.add(level)
            return ()
        config, was_on = self._config, job.state.on
        limit = max(config.min_effect * baseline.center, config.noise_factor * baseline.spread)
        excess = (level - baseline.center) / limit if limit > 0 else 0.0
        on = job.state.update(excess, job.span)
        job.faster_blocks = job.faster_blocks + 1 if excess <= -1 else 0
        if job.faster_blocks >= FASTER_BLOCKS or (on and self._is_new_normal(job, seen.time)):
            baseline.restart(list(job.recent))
            job.state.reset()
            job.faster_blocks = 0
            return (Fine(seen.time, seen.job),) if was_on else ()
        if on:
            if not was_on:
                job.found_time = seen.time
            return (self._found(job, level, seen),)
        if abs(excess) < 1:
            baseline.add(level)
        return (Fine(seen.time, seen.job),) if was_on else ()

    def _is_new_normal(self, job: _Job, now: float) -> bool:
        lasted = job.state.count >= self._config.accept_blocks
        return lasted and now - job.found_time >= self._config.accept_after_s

    def _found(self, job: _Job, level: float, seen: JobStep) -> Found:
        center, begin = job.baseline.center, job.state.begin_step
        rise = level / center - 1
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            step=seen.step,
            begin_step=begin,
            value=level,
            baseline=center,
            summary=f"steps take {100 * rise:.0f} % longer since step {begin}: "
            f"{level:.3g} s instead of {center:.3g} s",
        )
