"""Agents that a fleet cannot reach or that are behind, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from warpwatch_runtime.quantities import plural, seconds, text
from warpwatch_telemetry.samples import NOT_ASKED, SourceHealth

# An agent that is well is less behind.
LATE_S = 3.0
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
