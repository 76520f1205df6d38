"""Captures: their result, cost and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple
from urllib.parse import quote

from warpwatch_runtime.quantities import NO_VALUE, percent, plural, seconds, text
from warpwatch_telemetry.captures import Capture, Residual
from warpwatch_telemetry.state import State

MAX_CAPTURES = 20
# The first are shown with their cost and files, the others as rows.
MAX_CARDS = 3
MAX_FILES = 16
# A smaller change of the step time is noise.
MIN_RESIDUAL = 0.05
REPORT = "report.html"
# Shown as links of their own, or of no use to a reader.
_NOT_LISTED = (REPORT, "capture.json")


class Explanation(NamedTuple):
    """The diagnosis of a capture in words; empty if there is none."""

    verdict: str = ""
    reason: str = ""
    advice: str = ""


def newest(state: State, show: str | None) -> list[Capture]:
    """Return the newest captures, the one with the id ``show`` first."""
    order = sorted(state.captures, key=lambda capture: (capture.id != show, -capture.time))
    return order[:MAX_CAPTURES]


def facts(capture: Capture) -> Iterator[tuple[str, str]]:
    """Yield names and facts, as far as they are known."""
    cost = ""
    if capture.cost_s is not None:
        # The difference of two measurements: the steps beside it may have been slower.
        cost = f"{seconds(capture.cost_s)} of training" if capture.cost_s > 0 else "none measured"
    elif capture.expected_cost_s:
        cost = f"{seconds(capture.expected_cost_s)} expected"
    known = {
        "steps": steps(capture),
        "traces": verified(capture),
        "price of a step": price(capture.step_s),
        "cost": cost,
        "after it": residual(capture.residual),
        "copy": capture.remote or "",
    }
    return ((name, fact) for name, fact in known.items() if fact)


def files(capture: Capture) -> list[str]:
    """Return the names of useful files; the report has a link of its own."""
    return [name for name in capture.files if name not in _NOT_LISTED]


def href(capture: Capture, name: str) -> str:
    return f"/api/v1/captures/{quote(capture.id, safe='')}/{quote(name, safe='')}"


def outcome(capture: Capture) -> str:
    """Return such as ``complete 2/2``: the ranks with a file, of all that were asked."""
    written = sum(1 for rank in capture.ranks if rank.state == "written")
    count = f" {written}/{len(capture.ranks)}" if capture.ranks else ""
    if capture.outcome is not None:
        elsewhere = capture.world_size - len(capture.ranks)
        world = f" (world size {capture.world_size})" if capture.ranks and elsewhere > 0 else ""
        return f"{capture.outcome.replace('_', ' ')}{count}{world}"
    states = Counter(rank.state for rank in capture.ranks).most_common(1)
    return f"{states[0][0] if states else 'begun'}{count}"


def price(step_s: Mapping[str, float]) -> str:
    """Return the cost of recording a step; empty if it is not known."""
    before, during = step_s.get("before"), step_s.get("during")
    if not before or not during:
        return ""
    after = step_s.get("after")
    back = f", {seconds(after)} after" if after else ""
    return f"{seconds(before)} → {seconds(during)} ({_signed(during / before - 1)}){back}"


def steps(capture: Capture) -> str:
    """Return the recorded steps, and how many were requested; empty for a kind without steps."""
    count, asked = capture.steps, capture.request.steps
    if count is None:
        return ""
    first = capture.start_step
    which = plural(count, "step")
    if first is not None:
        which = f"{first} to {first + count - 1}" if count > 1 else str(first)
    cut = f", {count} of {asked} asked for: more cost too much" if count < asked else ""
    return which + cut


def verified(capture: Capture) -> str:
    """Return whether the traces are complete; empty before they were read."""
    read = [rank for rank in capture.ranks if rank.verified is not None]
    lacking = [rank for rank in read if not rank.verified]
    if not read:
        return ""
    if not lacking:
        events = max(rank.events or 0 for rank in read)
        return f"verified, {events:,} events a rank at most"
    return f"{len(lacking)} of {plural(len(read), 'trace')} not verified"


def residual(found: Residual | None) -> str:
    """Return the change that stayed after the capture, and over how many steps."""
    if found is None:
        return ""
    over = f"over {plural(found.steps, 'step')}"
    change = _signed(found.ratio - 1)
    if found.slower:
        return f"slower since: {change} {over}"
    stayed = abs(found.ratio - 1) > MIN_RESIDUAL
    return f"{'within its noise' if stayed else 'as before'}: {change} {over}"


def describe(capture: Capture) -> Explanation:
    """Return the diagnosis in words. Its traces may hold anything that a process wrote."""
    diagnosis = capture.diagnosis
    if diagnosis is None:
        failed = capture.diagnosis_outcome
        if capture.of_fleet and failed == "ok":
            return Explanation("part of a multi-node capture", "the fleet has its verdict")
        return Explanation(f"no diagnosis: {failed}" if failed else "")
    verdict = text(diagnosis.get("verdict", NO_VALUE), 40).replace("_", " ")
    finding = _first_finding(diagnosis)
    share = finding.get("share")
    has_share = isinstance(share, int | float) and share > 0
    explains = f"{percent(share)} of the step window" if has_share else ""
    summary = text(diagnosis.get("summary") or explains, 240)
    return Explanation(verdict, summary, text(finding.get("advice") or "", 300))


def _first_finding(diagnosis: Mapping[str, Any]) -> Mapping[str, Any]:
    findings = diagnosis.get("findings")
    first = findings[0] if isinstance(findings, list | tuple) and findings else {}
    return first if isinstance(first, Mapping) else {}


def detail(capture: Capture) -> str:
    """Return the failure of the capture, else of its ranks without a file."""
    if capture.detail:
        return capture.detail
    failed = [rank for rank in capture.ranks if rank.state in ("late", "failed", "missing")]
    if not failed or capture.outcome is None:
        return ""
    first = f"rank {failed[0].rank} {failed[0].state}"
    why = f": {failed[0].detail}" if failed[0].detail else ""
    more = f", and {plural(len(failed) - 1, 'more rank')}" if len(failed) > 1 else ""
    return f"{first}{why}{more}"


def tone(capture: Capture) -> str:
    """Return good, bad, or open while it runs."""
    if capture.outcome is None:
        return "open"
    whole = capture.outcome == "complete" and all(
        rank.verified is not False for rank in capture.ranks
    )
    return "good" if whole else "bad"


def _signed(ratio: float) -> str:
    return f"{ratio * 100:+.0f} %".replace("-", "\N{MINUS SIGN}")
