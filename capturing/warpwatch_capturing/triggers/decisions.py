"""What becomes of each anomaly's trigger: asked for now, later, again or not at all, and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from warpwatch_capturing.board import Board, LiveRank, LiveRanks
from warpwatch_capturing.config import RecipeConfig, TriggersConfig
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.triggers.baseline import BaselineCaptures
from warpwatch_capturing.triggers.recipes import request_for
from warpwatch_detection.anomalies.changes import Change
from warpwatch_telemetry.anomalies import EVENT_KINDS, WHOLE_JOB_KINDS, Anomaly
from warpwatch_telemetry.captures import (
    CAPTURED,
    INTERRUPTED,
    NO_RECIPE,
    WAITING,
    Capture,
    Decision,
)
from warpwatch_telemetry.errors import Refused

logger = logging.getLogger(__name__)

# Captures of one anomaly: one, and another when something came in between.
MAX_TRIES = 2
# What lasts is asked for again so long after a refusal that passes; asking costs next to nothing.
ASK_AGAIN_S = 60.0
# How long a slowdown that may only be waiting for another node's capture must last; captures of
# five steps are over by then.
OTHER_CAPTURE_S = 60.0
MAX_DECISIONS = 1000
# Decisions that may still change while the anomaly is active.
_OPEN = frozenset({WAITING, "refused_over"})
# Refusals that pass by themselves, or as soon as there is room.
_PASSING = frozenset(
    {
        "refused_quiet_hours",
        "refused_cooldown",
        "refused_budget",
        "refused_disk",
        "refused_quota",
        "refused_busy",
    }
)


@dataclass(slots=True)
class _Trigger:
    """Of one active anomaly. ask_at: wall clock, None while there is nothing to ask for.

    is_open: it was decided whether there is something to ask for.
    tries: captures that were begun. capture_id: of the one that may have to be repeated.
    refused: the reason of the last refusal, None after a capture was begun.
    """

    anomaly: Anomaly
    is_open: bool = False
    ask_at: float | None = None
    tries: int = 0
    capture_id: str | None = None
    refused: str | None = None


class Triggers:
    """Follows the anomalies, for the pipeline alone, and asks the service for captures.

    What was captured is known from the capture store, so that a restart of the daemon asks for
    nothing twice. Decisions are published through the board.
    """

    def __init__(self, service: CaptureService, ranks: LiveRanks, board: Board) -> None:
        self._service = service
        self._ranks = ranks
        self._board = board
        self._baseline = BaselineCaptures(service, board)
        self._triggers: dict[str, _Trigger] = {}
        self._decisions: dict[str, Decision] = {}
        for capture in service.register.all():
            if capture.request.anomaly_id is not None:
                self._decide_captured(capture.request.anomaly_id, capture)

    @property
    def _config(self) -> TriggersConfig:
        """Of the policy: a reload swaps it there."""
        return self._service.policy.config

    def advance(self, now: float, changes: Iterable[Change], active: Sequence[Anomaly]) -> None:
        """``now``: wall clock in seconds; changes: since the last call; active: all that are."""
        newest = {change.anomaly.id: change.anomaly for change in changes}
        for anomaly in newest.values():
            self._follow(anomaly, now)
        for trigger in self._triggers.values():
            if not trigger.is_open:
                trigger.is_open = True
                self._open(trigger, now)
            self._look_after(trigger, now)
            if trigger.ask_at is not None and now >= trigger.ask_at:
                self._ask(trigger, active, now)
        self._baseline.advance(now, active)

    def _follow(self, anomaly: Anomaly, now: float) -> None:
        trigger = self._triggers.get(anomaly.id)
        if anomaly.end_time is not None:
            if trigger is not None:
                del self._triggers[anomaly.id]
                self._over(trigger, now)
        elif trigger is None:
            self._triggers[anomaly.id] = _Trigger(anomaly)
        else:
            trigger.anomaly = anomaly

    def _open(self, trigger: _Trigger, now: float) -> None:
        """The anomaly is new, or new to this daemon."""
        anomaly = trigger.anomaly
        taken = [
            capture
            for capture in self._service.register.all()
            if capture.request.anomaly_id == anomaly.id and capture.outcome != "refused_disk"
        ]
        known = self._decisions.get(anomaly.id)
        if taken:
            trigger.tries, trigger.capture_id = len(taken), taken[-1].id
            return
        if known is not None and known.outcome not in _OPEN:
            if not _passes(anomaly, known.outcome):
                return
            trigger.refused = known.outcome
        recipe = self._config.recipes.get(anomaly.kind)
        if recipe is None:
            self._decide(anomaly.id, now, NO_RECIPE, f"triggers.recipes: none for {anomaly.kind}")
        elif anomaly.job_id is None:
            self._refuse(anomaly, recipe, now, "refused_no_rank", "no job is known to be there")
        else:
            self._open_job(trigger, recipe, self._ranks.targets(anomaly.job_id), now)

    def _open_job(
        self, trigger: _Trigger, recipe: RecipeConfig, local: Mapping[int, LiveRank], now: float
    ) -> None:
        """Kinds that all nodes of the job see are acted on where rank 0 is."""
        anomaly = trigger.anomaly
        world_size = max((rank.world_size for rank in local.values()), default=1)
        if anomaly.kind not in WHOLE_JOB_KINDS or len(local) >= world_size:
            trigger.ask_at = now
        elif 0 in local:
            # Seen only as waiting for others, it may be the capture of another node's ranks.
            trigger.ask_at = anomaly.time + OTHER_CAPTURE_S
            detail = f"whether it lasts {OTHER_CAPTURE_S:g} s: it may be another node's capture"
            self._decide(anomaly.id, now, WAITING, detail)
        else:
            detail = "the daemon that has rank 0 acts on it"
            self._refuse(anomaly, recipe, now, "refused_other_node", detail)

    def _look_after(self, trigger: _Trigger, now: float) -> None:
        """Of a capture that was interrupted another one is asked for, once."""
        if trigger.capture_id is None:
            return
        capture = self._service.register.get(trigger.capture_id)
        if capture is not None and capture.outcome is None:
            return
        trigger.capture_id = None
        if capture is not None and capture.outcome == "refused_disk":
            # The store had no room, which only the attempt could show.
            trigger.tries -= 1
            self._refused(trigger, Refused(capture.outcome, capture.detail), now)
            return
        if capture is None or trigger.tries >= MAX_TRIES:
            return
        if is_interrupted(capture, trigger.anomaly.rank):
            trigger.ask_at = now
            detail = f"for another try: {capture.detail}"
            self._decide(trigger.anomaly.id, now, WAITING, detail, capture.id)

    def _ask(self, trigger: _Trigger, active: Sequence[Anomaly], now: float) -> None:
        anomaly = trigger.anomaly
        recipe = self._config.recipes.get(anomaly.kind)
        if recipe is None or anomaly.job_id is None:
            # A reload has taken the recipe away.
            trigger.ask_at = None
            self._decide(anomaly.id, now, NO_RECIPE, f"triggers.recipes: none for {anomaly.kind}")
            return
        local = self._ranks.targets(anomaly.job_id)
        again = trigger.tries or trigger.refused is not None
        if again and not self._can_try_again(anomaly, local):
            return
        request = request_for(anomaly, recipe, local, active, self._service.register.all())
        try:
            capture = self._service.request(request)
        except Refused as refused:
            self._refused(trigger, refused, now)
        else:
            trigger.ask_at = trigger.refused = None
            trigger.tries += 1
            trigger.capture_id = capture.id
            self._decide_captured(anomaly.id, capture)

    def _refused(self, trigger: _Trigger, refused: Refused, now: float) -> None:
        """By the service, which has counted and logged it."""
        anomaly, reason = trigger.anomaly, refused.reason
        busy = reason == "refused_busy"
        # Ranks are looked at all the time, and asked for as soon as they are free.
        pause_s = 0.0 if busy and trigger.refused != reason else ASK_AGAIN_S
        trigger.ask_at = now + pause_s if _passes(anomaly, reason) else None
        trigger.refused = reason
        self._decide(anomaly.id, now, WAITING if busy else reason, str(refused))

    def _can_try_again(self, anomaly: Anomaly, local: Mapping[int, LiveRank]) -> bool:
        there = bool(local) if anomaly.rank is None else anomaly.rank in local
        job = anomaly.job_id
        return there and job is not None and not self._service.is_busy(job)

    def _over(self, trigger: _Trigger, now: float) -> None:
        anomaly, recipe = trigger.anomaly, self._config.recipes.get(trigger.anomaly.kind)
        known = self._decisions.get(anomaly.id)
        # What was refused until its end keeps that answer.
        waited = known is not None and known.outcome == WAITING
        if waited and trigger.ask_at is not None and recipe is not None:
            self._refuse(anomaly, recipe, now, "refused_over", "it was over before")

    # --- what is known of them ---

    def _refuse(
        self, anomaly: Anomaly, recipe: RecipeConfig, now: float, reason: str, detail: str
    ) -> None:
        self._board.metrics.count_capture(recipe.kind, "anomaly", reason, anomaly.owner)
        logger.info("no %s capture for %s: %s", recipe.kind, anomaly.kind, detail)
        self._decide(anomaly.id, now, reason, detail)

    def _decide_captured(self, anomaly_id: str, capture: Capture) -> None:
        self._decide(anomaly_id, capture.time, CAPTURED, "", capture.id)

    def _decide(
        self,
        anomaly_id: str,
        now: float,
        outcome: str,
        detail: str,
        capture_id: str | None = None,
    ) -> None:
        self._decisions.pop(anomaly_id, None)
        self._decisions[anomaly_id] = Decision(now, anomaly_id, outcome, detail, capture_id)
        while len(self._decisions) > MAX_DECISIONS:
            del self._decisions[next(iter(self._decisions))]
        self._board.publish(decisions=tuple(self._decisions.values()))


def _passes(anomaly: Anomaly, reason: str) -> bool:
    """Whether it is asked again. An event is over when the refusal is: only ranks are awaited."""
    if anomaly.kind in EVENT_KINDS:
        return reason == "refused_busy"
    return reason in _PASSING


def is_interrupted(capture: Capture, culprit: int | None) -> bool:
    """Whether a capture that has ended lacks what it was for because something came in between.

    That is the end of the daemon or of a process, or an evaluation or checkpoint that began.
    """
    lost = [rank for rank in capture.ranks if rank.state != "written"]
    if capture.outcome == "partial":
        lost = [rank for rank in lost if rank.rank == culprit]
    elif capture.outcome != "failed":
        return False
    between = (INTERRUPTED, "the process ended", "the process died", "the process exits")
    return capture.detail.startswith(INTERRUPTED) or any(
        rank.detail.startswith(between) for rank in lost
    )
