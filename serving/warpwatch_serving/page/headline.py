"""The one line on top of the page: is all well, and if not, what is the worst of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from warpwatch_runtime.quantities import plural, text
from warpwatch_serving.page.agents import unseen
from warpwatch_telemetry.anomalies import Anomaly, sentence
from warpwatch_telemetry.samples import DeviceSample
from warpwatch_telemetry.state import RankState, State

Level = Literal["well", "idle", "info", "warning", "critical"]

MAX_BLIND = 5
MAX_CHARS = 400
SEVERITIES = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True)
class Headline:
    """``notes``: what else to know, one sentence each."""

    level: Level
    sentence: str
    notes: tuple[str, ...] = ()


def headline(state: State) -> Headline:
    """Return the worst of all; a fleet that does not see most of its agents is the worst."""
    agents, found = unseen(state.sources), _worst(state)
    notes = (*agents.notes, *_notes(state))
    if not agents.sentence:
        return replace(found, notes=notes)
    is_worse = found.level in ("warning", "critical")
    if is_worse and not agents.is_blind:
        return replace(found, notes=(agents.sentence, *notes))
    level: Level = "critical" if agents.is_blind else "warning"
    return Headline(level, agents.sentence, (found.sentence, *notes) if is_worse else notes)


def _notes(state: State) -> Iterator[str]:
    for source in state.sources:
        if not source.up and source.lag_s is None:
            yield f"{text(source.name)} cannot be read: {text(source.reason) or 'no reason known'}"
    blind = [sight for sight in state.sensitivities if sight.blind]
    for sight in blind[:MAX_BLIND]:
        yield f"{text(sight.job)}: {sight.kind} is blind: {text(sight.text)}"


def _worst(state: State) -> Headline:
    active = worst_first(state)
    if active:
        count = plural(len(active), "anomaly", "anomalies")
        worst = text(sentence(active[0], state.hostname), MAX_CHARS)
        return Headline(active[0].severity, f"{count}: {worst}")
    down = [sample for sample in state.devices if not sample.up]
    if down:
        return Headline("critical", _down(down, state))
    dead = [rank for rank in state.ranks if rank.status not in ("running", "exited")]
    if dead:
        return Headline("warning", _dead(dead))
    return _nothing_wrong(state)


def worst_first(state: State) -> list[Anomaly]:
    """The active anomalies, of one severity the newest first."""
    active = [anomaly for anomaly in state.anomalies if anomaly.end_time is None]
    return sorted(active, key=lambda anomaly: (SEVERITIES.index(anomaly.severity), -anomaly.time))


def _down(down: list[DeviceSample], state: State) -> str:
    nodes = {source.name for source in state.sources if source.lag_s is not None}
    names = ", ".join(
        f"{one.device.index} on {text(one.source)}"
        if one.source in nodes
        else str(one.device.index)
        for one in down[:8]
    )
    reasons = ", ".join(sorted({text(sample.reason) or "unknown" for sample in down}))
    return f"GPU {names} cannot be read: {reasons}"


def _dead(dead: list[RankState]) -> str:
    first = dead[0]
    what = {"died": "died", "stopped": "is stopped"}.get(first.status, text(first.status))
    more = f", and {len(dead) - 1} more" if len(dead) > 1 else ""
    return f"Rank {text(first.name)} of job {text(first.job)} {what}{more}"


def _nothing_wrong(state: State) -> Headline:
    devices = plural(len(state.devices), "GPU")
    running = [rank for rank in state.ranks if rank.status == "running"]
    jobs = sorted({rank.job_id for rank in running})
    if not running:
        return _idle(state, devices)
    whose = f"job {text(jobs[0].name)}" if len(jobs) == 1 else f"{len(jobs)} jobs"
    ranks = f"{plural(len(running), 'rank')} of {whose}"
    sentence = f"{devices}, {ranks}" if state.devices else ranks
    return Headline("well", f"All well: {sentence}")


def _idle(state: State, devices: str) -> Headline:
    if not state.devices and not state.ranks:
        return Headline("idle", "Nothing to watch yet: no GPU and no training process")
    what = "every training process has ended" if state.ranks else "no training process yet"
    sentence = f"{devices}, {what}" if state.devices else what
    return Headline("idle", f"All well: {sentence}")
