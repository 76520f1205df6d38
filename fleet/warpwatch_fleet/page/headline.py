"""The line on top of the fleet's page: whether it sees its nodes, then what is wrong on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from warpwatch_fleet.node import NOT_ASKED
from warpwatch_fleet.page.nodes import LATE_S
from warpwatch_runtime.quantities import plural, seconds, text
from warpwatch_serving.page.headline import SEVERITIES, Headline, Level
from warpwatch_serving.page.headline import headline as of_node
from warpwatch_telemetry.samples import SourceHealth
from warpwatch_telemetry.state import State

MAX_REASONS = 3
MAX_NAMES = 3
# With fewer agents in time, nothing else on the page can be relied on.
MIN_IN_TIME = 0.5


def headline(state: State) -> Headline:
    """Return the fleet's own trouble if it is blind or nothing is worse; else as a note."""
    found = of_node(replace(state, sources=()))
    new = [one for one in state.sources if not one.up and one.reason == NOT_ASKED]
    down = [one for one in state.sources if not one.up and one.reason != NOT_ASKED]
    late = [one for one in state.sources if one.up and one.duration_s >= LATE_S]
    asked = (f"{plural(len(new), 'agent')} not asked yet",) if new else ()
    own, notes = _own(state.sources, down, late), (*_reasons(down), *asked, *found.notes)
    if not own:
        return replace(found, notes=notes)
    is_blind = len(down) + len(late) > MIN_IN_TIME * len(state.sources)
    level: Level = "critical" if is_blind else "warning"
    troubled = found.level in SEVERITIES
    if troubled and not is_blind and found.level != "info":
        return replace(found, notes=(own, *notes))
    return Headline(level, own, (found.sentence, *notes) if troubled else notes)


def _own(
    known: Sequence[SourceHealth], down: Sequence[SourceHealth], late: Sequence[SourceHealth]
) -> str:
    parts = []
    if down:
        parts.append(f"{len(down)} of {plural(len(known), 'agent')} cannot be reached")
    if late:
        of = "" if down else f" of {plural(len(known), 'agent')}"
        are = "is" if len(late) == 1 else "are"
        longest = seconds(max(one.duration_s for one in late))
        parts.append(f"{len(late)}{of} {are} up to {longest} behind")
    return ", ".join(parts)


def _reasons(down: Sequence[SourceHealth]) -> Iterator[str]:
    """Yield why agents cannot be reached, the most frequent reason first."""
    by_reason: dict[str, list[str]] = {}
    for one in down:
        by_reason.setdefault(text(one.reason) or "no reason known", []).append(text(one.name, 60))
    order = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    for reason, names in order[:MAX_REASONS]:
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        yield f"{', '.join(names[:MAX_NAMES])}{more}: {reason}"
