"""The headline and the anomalies: what is wrong, the worst first, and agents that are not seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from warpwatch_runtime.quantities import ago, plural, seconds, text
from warpwatch_serving.bodies import PageFilters
from warpwatch_telemetry.anomalies import Anomaly, sentence
from warpwatch_telemetry.captures import CAPTURED, NO_RECIPE, WAITING, Capture
from warpwatch_telemetry.samples import NOT_ASKED, DeviceSample, SourceHealth
from warpwatch_telemetry.state import RankState, State

# An agent that is well is less behind, even if it tells its clock every four seconds (on a bus).
LATE_S = 5.0
MAX_REASONS = 3
MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class UnseenAgents:
    """sentence: how many are down or behind, empty if none. notes: why, a sentence each.

    is_blind: whether they are most of all agents, so that nothing else can be relied on.
    """

    sentence: str
    notes: tuple[str, ...]
    is_blind: bool


def unseen(sources: Sequence[SourceHealth]) -> UnseenAgents:
    agents = [one for one in sources if one.lag_s is not None]
    new = [one for one in agents if not one.up and one.reason == NOT_ASKED]
    down = [one for one in agents if not one.up and one.reason != NOT_ASKED]
    late_s = [one.lag_s or 0.0 for one in agents if is_late(one)]
    asked = (f"{plural(len(new), 'agent')} not asked yet",) if new else ()
    return UnseenAgents(
        _sentence(len(agents), len(down), late_s),
        (*_reasons(down), *asked),
        2 * (len(down) + len(late_s)) > len(agents),
    )


def is_late(agent: SourceHealth) -> bool:
    return agent.up and (agent.lag_s or 0.0) >= LATE_S


def _sentence(agents: int, down: int, late_s: Sequence[float]) -> str:
    of = f" of {plural(agents, 'agent')}"
    parts = [f"{down}{of} cannot be reached"] if down else []
    if late_s:
        are = "is" if len(late_s) == 1 else "are up to"
        parts.append(f"{len(late_s)}{'' if down else of} {are} {seconds(max(late_s))} behind")
    return ", ".join(parts)


def _reasons(down: Sequence[SourceHealth]) -> Iterator[str]:
    """Yield why agents cannot be reached, the most frequent reason first."""
    names: dict[str, list[str]] = {}
    for one in down:
        names.setdefault(text(one.reason) or "no reason known", []).append(text(one.name, 60))
    for reason in sorted(names, key=lambda reason: -len(names[reason]))[:MAX_REASONS]:
        first, more = names[reason][:MAX_NAMES], len(names[reason]) - MAX_NAMES
        yield f"{', '.join(first)}{f' and {more} more' if more > 0 else ''}: {reason}"


Level = Literal["well", "idle", "info", "warning", "critical"]

MAX_BLIND = 5
MAX_CHARS = 400
SEVERITIES = ("critical", "warning", "info")


@dataclass(frozen=True, slots=True)
class Headline:
    """``notes``: further sentences."""

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
    blind = [one for one in state.sensitivities if one.blind]
    for one in blind[:MAX_BLIND]:
        yield f"{text(one.job)}: {one.kind} is blind: {text(one.text)}"


def _worst(state: State) -> Headline:
    active = worst_first(state)
    if active:
        count = plural(len(active), "anomaly", "anomalies")
        worst = text(sentence(active[0], state.hostname), MAX_CHARS)
        return Headline(active[0].severity, f"{count}: {worst}")
    away = {one.name for one in state.sources if one.lag_s is not None and not one.up}
    down = [one for one in state.devices if not one.up and one.source not in away]
    if down:
        return Headline("critical", _down(down, state))
    dead = [rank for rank in state.ranks if rank.status not in ("running", "exited")]
    if dead:
        return Headline("warning", _dead(dead))
    return _nothing_wrong(state)


def worst_first(state: State) -> list[Anomaly]:
    """Return the active anomalies, of one severity the newest first."""
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


# Rows, unless all are asked for.
MAX_ACTIVE = 20
MAX_ENDED = 5
# The first are shown with their drawings and diagnosis, the others as rows.
MAX_CARDS = 3


def listed(state: State, wanted: PageFilters) -> list[Anomaly]:
    """Return the anomaly ``show``, active ones, the worst first, and ended ones, newest first."""
    chosen = [anomaly for anomaly in state.anomalies if anomaly.id == wanted.show]
    ended = [anomaly for anomaly in state.anomalies if anomaly.end_time is not None]
    ended.sort(key=lambda anomaly: -anomaly.time)
    others = worst_first(state)[: None if wanted.all else MAX_ACTIVE] + ended[:MAX_ENDED]
    return chosen + [anomaly for anomaly in others if anomaly.id != wanted.show]


def active(state: State) -> int:
    return sum(1 for anomaly in state.anomalies if anomaly.end_time is None)


def sentence_of(anomaly: Anomaly, state: State) -> str:
    return sentence(anomaly, state.hostname)


def when(anomaly: Anomaly, state: State) -> str:
    now = state.time
    again = f", came back {plural(anomaly.reopened, 'time')}" if anomaly.reopened else ""
    if anomaly.end_time is None:
        return f"found {ago(anomaly.time, now)}{again}"
    whole_s = int(anomaly.end_time - anomaly.time)
    lasted = seconds(float(whole_s)) if whole_s else "less than 1 s"
    if anomaly.explained_by is not None:
        kinds = {one.id: one.kind.replace("_", " ") for one in state.anomalies}
        cause = kinds.get(anomaly.explained_by, "another anomaly")
        return f"explained by {cause}, {ago(anomaly.end_time, now)}"
    return f"over, {ago(anomaly.end_time, now)}; it lasted {lasted}{again}"


def capture_of(anomaly: Anomaly, state: State) -> Capture | None:
    """Return the newest capture that the anomaly has triggered."""
    asked = [capture for capture in state.captures if capture.request.anomaly_id == anomaly.id]
    return max(asked, key=lambda capture: capture.time, default=None)


def why_no_capture(anomaly: Anomaly, state: State) -> str:
    """Empty where none was wanted."""
    decision = next((d for d in state.decisions if d.anomaly_id == anomaly.id), None)
    if decision is None or decision.outcome in (CAPTURED, NO_RECIPE):
        return ""
    what = "Waits with a capture" if decision.outcome == WAITING else "No capture"
    return f"{what}: {text(decision.detail or decision.outcome, 240)}"
