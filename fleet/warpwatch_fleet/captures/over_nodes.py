"""One capture over nodes: all ranks begin with the same step, or none does."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import msgspec

from warpwatch_capturing.participant import MAX_AHEAD_STEPS, fastest
from warpwatch_fleet.captures.part import Part, are_armed, outcome_of
from warpwatch_fleet.following import AgentError, Agents
from warpwatch_telemetry.captures import STEP_KINDS, Capture, Prepared
from warpwatch_telemetry.errors import Refused

logger = logging.getLogger(__name__)

# All nodes hear of the start step, their ranks arm, and the fleet hears of that: within a second.
# It is twice as much at each attempt.
MARGIN_S = 2.0
MARGIN_STEPS = 4
ATTEMPTS = 3
# The profiler starts with the step before the first; until half a step before that ranks may arm.
LEAD_STEPS = 1.5
# Where nobody knows what a step takes.
UNKNOWN_S = 10.0
# Between attempts, so that of two fleets that want the same ranks one comes first.
PAUSE_S = (0.1, 1.0)
LOOK_S = 0.1
# An agent that is gone for so long, or has no such capture, brings nothing more.
LOST_S = 30.0
# More than an agent lets one of its own last.
MAX_S = 3 * 3600.0


class OverNodes:
    """``take`` it, in the loop that follows the agents.

    look: sets what a part's node has said of a capture of this name, and answers why nothing can
    be heard of it now (empty where it can). keep: gets the capture whenever it has changed.
    """

    def __init__(
        self,
        capture: Capture,
        parts: Sequence[Part],
        agents: Agents,
        look: Callable[[Part, str], str],
        keep: Callable[[Capture], None],
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._capture = capture
        self._parts = parts
        self._agents = agents
        self._look = look
        self._keep = keep
        self._monotonic = monotonic
        self._wall = wall
        self._sleep = sleep
        # What it is called on the nodes: another try is another capture there.
        self._name = capture.id

    async def take(self) -> Capture:
        """The capture as it has ended, which ``keep`` does not get. Raises nothing for what an
        agent did."""
        try:
            if self._capture.request.kind in STEP_KINDS:
                await self._begin_together()
            else:
                await self._begin_at_once()
            await self._follow()
            outcome = outcome_of(self._parts)
            detail = "; ".join(filter(None, (part.shortcoming() for part in self._parts)))
        except Refused as error:
            outcome, detail = error.reason, str(error)
        return replace(self._capture, outcome=outcome, detail=detail, end_time=self._wall())

    # --- beginning ---

    async def _begin_at_once(self) -> None:
        """Whoever refuses is left out."""
        for part, answer in await self._ask("captures", id=self._name):
            if isinstance(answer, Exception):
                part.lost = str(answer)

    async def _begin_together(self) -> None:
        """Raises Refused where a node refuses, or not all have armed in time again and again."""
        why = ""
        for attempt in range(1, ATTEMPTS + 1):
            self._name = self._capture.id + (f"-{attempt}" if attempt > 1 else "")
            start, steps, until = await self._prepare(MARGIN_S * 2 ** (attempt - 1))
            self._show(start_step=start, steps=steps)
            why = await self._arm(start, steps)
            if not why and (await self._have_armed(until) or attempt == ATTEMPTS):
                return
            await self._ask(f"captures/{self._name}/cancel")
            for part in self._parts:
                part.said = None
            await self._sleep(random.uniform(*PAUSE_S))
        raise Refused("failed", f"not armed in {ATTEMPTS} tries: {why}")

    async def _prepare(self, margin_s: float) -> tuple[int, int, float]:
        """The start step, how many are recorded, and until when (monotonic) all must have armed."""
        found: list[Prepared] = []
        asked_at = self._monotonic()
        for part, answer in await self._ask("captures/prepare"):
            if isinstance(answer, Refused):
                raise Refused(answer.reason, f"{part.node}: {answer}")
            try:
                found.append(_prepared(answer))
            except AgentError as error:
                part.lost = str(error)
        if not found:
            raise Refused("failed", "; ".join(part.shortcoming() for part in self._parts))
        # Ranks went on while the slowest agent answered.
        took_s = self._monotonic() - asked_at
        step_s = statistics.median(one.step_s or 0.0 for one in found)
        in_time = (margin_s + took_s) / step_s if step_s > 0 else 0
        ahead = max(MARGIN_STEPS, math.ceil(min(in_time, MAX_AHEAD_STEPS)))
        start = fastest(one.begun or 0 for one in found) + ahead
        wait_s = (ahead - LEAD_STEPS) * step_s if step_s > 0 else UNKNOWN_S
        return start, min(one.steps or 1 for one in found), asked_at + wait_s

    async def _arm(self, start: int, steps: int) -> str:
        """Why a node did not, empty where all were told. Raises Refused for what does not pass."""
        refusals = []
        answers = await self._ask("captures", id=self._name, start_step=start, steps=steps)
        for part, answer in answers:
            if isinstance(answer, Exception):
                refusals.append((answer, f"{part.node}: {answer}"))
        for error, text in refusals:
            if isinstance(error, Refused) and error.reason not in ("refused_over", "refused_busy"):
                await self._ask(f"captures/{self._name}/cancel")
                raise Refused(error.reason, text)
        return "; ".join(text for _, text in refusals)

    async def _have_armed(self, until: float) -> bool:
        while self._monotonic() < until:
            self._hear()
            armed = are_armed(self._parts)
            if armed is not None:
                return armed
            await self._sleep(LOOK_S)
        return False

    async def _ask(self, path: str, **more: Any) -> list[tuple[Part, Any]]:
        """All nodes at once: of each what it answered, or the Refused or AgentError."""
        parts = [part for part in self._parts if not part.lost]
        request = self._capture.request
        answers = await asyncio.gather(
            *(self._agents.ask(part.target, path, part.body(request, **more)) for part in parts),
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, Refused | AgentError):
                raise answer
        return list(zip(parts, answers, strict=True))

    # --- following ---

    async def _follow(self) -> None:
        deadline = self._monotonic() + MAX_S
        while not all(part.is_over for part in self._parts):
            self._hear()
            if self._monotonic() >= deadline:
                for part in self._parts:
                    part.lost = part.lost or ("" if part.is_over else "not done in time")
            await self._sleep(LOOK_S)

    def _hear(self) -> None:
        now = self._monotonic()
        for part in self._parts:
            if part.is_over:
                continue
            away = self._look(part, self._name)
            if not away and part.said is not None:
                part.silent_since = None
                continue
            part.silent_since = now if part.silent_since is None else part.silent_since
            if now - part.silent_since >= LOST_S:
                part.lost = away or "it has no such capture"
        self._show()

    def _show(self, **changes: Any) -> None:
        ranks = sorted(
            (one for part in self._parts for one in part.states()), key=attrgetter("rank")
        )
        capture = replace(self._capture, ranks=tuple(ranks), **changes)
        if capture != self._capture:
            self._capture = capture
            self._keep(capture)


def _prepared(answer: Mapping[str, Any] | AgentError) -> Prepared:
    """Raises AgentError."""
    if isinstance(answer, AgentError):
        raise answer
    try:
        return msgspec.convert(answer, Prepared)
    except msgspec.ValidationError as error:
        raise AgentError(f"prepare: {error}") from error
