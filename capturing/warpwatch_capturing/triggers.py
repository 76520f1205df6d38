"""Captures for anomalies: requested now, later, again or not at all, and why."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from warpwatch_capturing.config import RecipeConfig
from warpwatch_capturing.participant import Board, Capturer, RunningRank
from warpwatch_detection.anomalies.register import Change
from warpwatch_telemetry.anomalies import DEVICE_KINDS, EVENT_KINDS, WHOLE_JOB_KINDS, Anomaly
from warpwatch_telemetry.captures import (
    CAPTURED,
    INTERRUPTED,
    NO_RECIPE,
    WAITING,
    AnomalySeen,
    Capture,
    CaptureRequest,
    Decision,
)
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.newest import put_newest

logger = logging.getLogger(__name__)

# Captures per anomaly: one, and another when something came in between.
MAX_TRIES = 2
# Between requests for an anomaly that lasts, after a refusal that passes.
ASK_AGAIN_S = 60.0
# How long a slowdown that may only be waiting for another node's capture must last; captures of
# five steps are over by then.
OTHER_CAPTURE_S = 60.0
MAX_DECISIONS = 1000
# Decisions that may still change while the anomaly is active.
_OPEN = frozenset({WAITING, "refused_over"})
# Refusals that pass by themselves, or as soon as there is space.
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
    """The trigger of one active anomaly.

    is_open: whether it has been decided if a capture is wanted. ask_at: wall clock, or None while
    nothing is to be requested. tries: the number of started captures. capture_id: the capture that
    may have to be repeated. refused: the reason of the last refusal, None after a start.
    """

    anomaly: Anomaly
    is_open: bool = False
    ask_at: float | None = None
    tries: int = 0
    capture_id: str | None = None
    refused: str | None = None


class Triggers:
    """Follows anomalies and requests captures for them, for one thread at a time.

    Captures are found in the store, so that a restart requests nothing twice. Decisions are
    published through the board. ``targets`` returns the live ranks of a job on this node; None for
    a fleet, which sees all nodes and chooses peers itself. max_tries: captures per anomaly.
    """

    def __init__(
        self,
        capturer: Capturer,
        targets: Callable[[JobId], Mapping[int, RunningRank]] | None,
        board: Board,
        max_tries: int = MAX_TRIES,
    ) -> None:
        self._max_tries = max_tries
        self._capturer = capturer
        self._targets = targets
        self._board = board
        self._triggers: dict[str, _Trigger] = {}
        self._decisions: dict[str, Decision] = {}
        for capture in capturer.captures():
            if capture.request.anomaly_id is not None and not is_refused(capture):
                self._decide_captured(capture.request.anomaly_id, capture)

    def advance(self, now: float, changes: Iterable[Change], active: Sequence[Anomaly]) -> None:
        """Request what is due. ``now``: wall clock; changes: since the last call."""
        newest = {change.anomaly.id: change.anomaly for change in changes}
        for anomaly in newest.values():
            self._follow(anomaly, now)
        for trigger in self._triggers.values():
            if not trigger.is_open:
                trigger.is_open = True
                self._open(trigger, now)
            self._check_capture(trigger, now)
            if trigger.ask_at is not None and now >= trigger.ask_at:
                self._ask(trigger, active, now)

    def _follow(self, anomaly: Anomaly, now: float) -> None:
        trigger = self._triggers.get(anomaly.id)
        if anomaly.end_time is not None:
            if trigger is not None:
                del self._triggers[anomaly.id]
                self._close(trigger, now)
        elif trigger is None:
            self._triggers[anomaly.id] = _Trigger(anomaly)
        else:
            trigger.anomaly = anomaly

    def _recipe(self, anomaly: Anomaly) -> RecipeConfig | None:
        return self._capturer.config.recipes.get(anomaly.kind)

    def _open(self, trigger: _Trigger, now: float) -> None:
        """Decide about an anomaly that is new, or new to this process."""
        anomaly = trigger.anomaly
        taken = [
            capture
            for capture in self._capturer.captures()
            if capture.request.anomaly_id == anomaly.id and not is_refused(capture)
        ]
        known = self._decisions.get(anomaly.id)
        if taken:
            trigger.tries, trigger.capture_id = len(taken), taken[-1].id
            return
        if known is not None and known.outcome not in _OPEN:
            if not _passes(anomaly, known.outcome):
                return
            trigger.refused = known.outcome
        recipe = self._recipe(anomaly)
        if recipe is None:
            self._decide_without_recipe(anomaly, now)
        elif anomaly.job_id is None:
            self._refuse(anomaly, recipe, now, "refused_no_rank", "no job is known to be there")
        elif self._targets is None:
            trigger.ask_at = now
        else:
            self._open_job(trigger, recipe, self._targets(anomaly.job_id), now)

    def _open_job(
        self, trigger: _Trigger, recipe: RecipeConfig, local: Mapping[int, RunningRank], now: float
    ) -> None:
        """Leave kinds that all nodes of the job see to the node of rank 0."""
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

    def _check_capture(self, trigger: _Trigger, now: float) -> None:
        """Request a capture again, if it was refused meanwhile, or once if it was interrupted."""
        if trigger.capture_id is None:
            return
        capture = self._capturer.capture(trigger.capture_id)
        if capture is not None and capture.outcome is None:
            return
        trigger.capture_id = None
        if capture is not None and is_refused(capture):
            # Other nodes or a full disk have refused what had been started.
            trigger.tries -= 1
            self._refused(trigger, str(capture.outcome), capture.detail, now)
            return
        if capture is None or trigger.tries >= self._max_tries:
            return
        if is_interrupted(capture, trigger.anomaly.rank):
            trigger.ask_at = now
            detail = f"for another try: {capture.detail}"
            self._decide(trigger.anomaly.id, now, WAITING, detail, capture.id)

    def _ask(self, trigger: _Trigger, active: Sequence[Anomaly], now: float) -> None:
        anomaly, recipe = trigger.anomaly, self._recipe(trigger.anomaly)
        if recipe is None or anomaly.job_id is None:
            # A reload has removed the recipe.
            trigger.ask_at = None
            self._decide_without_recipe(anomaly, now)
            return
        local = None if self._targets is None else self._targets(anomaly.job_id)
        again = trigger.tries or trigger.refused is not None
        if again and not self._can_try_again(anomaly, local):
            return
        request = request_for(anomaly, recipe, local, active, self._capturer.captures())
        try:
            capture = self._capturer.request(request)
        except Refused as refused:
            self._refused(trigger, refused.reason, str(refused), now)
        else:
            trigger.ask_at = trigger.refused = None
            trigger.tries += 1
            trigger.capture_id = capture.id
            self._decide_captured(anomaly.id, capture)

    def _refused(self, trigger: _Trigger, reason: str, detail: str, now: float) -> None:
        """Note a refusal, which has been counted and logged."""
        busy = reason == "refused_busy"
        # Ranks are checked all the time, and requested as soon as they are free.
        pause_s = 0.0 if busy and trigger.refused != reason else ASK_AGAIN_S
        trigger.ask_at = now + pause_s if _passes(trigger.anomaly, reason) else None
        trigger.refused = reason
        self._decide(trigger.anomaly.id, now, WAITING if busy else reason, detail)

    def _can_try_again(self, anomaly: Anomaly, local: Mapping[int, RunningRank] | None) -> bool:
        there = local is None or (bool(local) if anomaly.rank is None else anomaly.rank in local)
        job = anomaly.job_id
        return there and job is not None and not self._capturer.is_busy(job)

    def _close(self, trigger: _Trigger, now: float) -> None:
        anomaly, recipe = trigger.anomaly, self._recipe(trigger.anomaly)
        known = self._decisions.get(anomaly.id)
        # Another refusal keeps its reason.
        if known is not None and known.outcome == WAITING and recipe is not None:
            self._refuse(anomaly, recipe, now, "refused_over", "it was over before")

    # --- decisions ---

    def _refuse(
        self, anomaly: Anomaly, recipe: RecipeConfig, now: float, reason: str, detail: str
    ) -> None:
        self._board.metrics.count_capture(recipe.kind, "anomaly", reason, anomaly.owner)
        logger.info("no %s capture for %s: %s", recipe.kind, anomaly.kind, detail)
        self._decide(anomaly.id, now, reason, detail)

    def _decide_without_recipe(self, anomaly: Anomaly, now: float) -> None:
        self._decide(anomaly.id, now, NO_RECIPE, f"triggers.recipes: none for {anomaly.kind}")

    def _decide_captured(self, anomaly_id: str, capture: Capture) -> None:
        self._decide(anomaly_id, capture.time, CAPTURED, "", capture.id)

    def _decide(
        self, anomaly_id: str, now: float, outcome: str, detail: str, capture_id: str | None = None
    ) -> None:
        decision = Decision(now, anomaly_id, outcome, detail, capture_id)
        put_newest(self._decisions, anomaly_id, decision, MAX_DECISIONS)
        self._board.publish(decisions=tuple(self._decisions.values()))


def is_refused(capture: Capture) -> bool:
    return (capture.outcome or "").startswith("refused_")


def _passes(anomaly: Anomaly, reason: str) -> bool:
    """Return whether to ask again. An event is over when the refusal is: only ranks are awaited."""
    if anomaly.kind in EVENT_KINDS:
        return reason == "refused_busy"
    return reason in _PASSING


def is_interrupted(capture: Capture, culprit: int | None) -> bool:
    """Return whether a capture failed because something came in between.

    Something is the end of the daemon or of a process, an evaluation or a checkpoint.
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


# An older capture of the same kind was of another problem.
REPEAT_S = 86400.0
# Kinds whose value and baseline are times.
TIMED_KINDS = frozenset({"straggler", "step_regression", "comm_slow", "latency_regression"})


def request_for(
    anomaly: Anomaly,
    recipe: RecipeConfig,
    local: Mapping[int, RunningRank] | None,
    active: Iterable[Anomaly],
    captures: Iterable[Capture],
) -> CaptureRequest:
    """Return the request for a job's anomaly.

    ``local``: the job's live ranks here, None for a fleet; ``active``: all active anomalies;
    ``captures``: those taken so far.
    """
    assert anomaly.job_id is not None
    # The rank that this kind names is a front end, which computes nothing: it has stacks only.
    kind = "stacks" if anomaly.kind == "latency_regression" and anomaly.rank else recipe.kind
    # If the same comes back, the cheap capture was not enough.
    again = _is_repeated(anomaly, captures)
    options = {*recipe.options, *(("stacks",) if again else ())}
    return CaptureRequest(
        **anomaly.job_id.fields(),
        kind=kind,
        trigger="anomaly",
        ranks=ranks_of(anomaly, recipe, local, active),
        steps=recipe.steps,
        options=tuple(sorted(options)) if kind == "torch" else (),
        reason=anomaly.summary,
        anomaly_id=anomaly.id,
        anomaly_kind=anomaly.kind,
        anomaly_seen=AnomalySeen(anomaly.rank, anomaly.begin_step, _ratio(anomaly)),
    )


def _ratio(anomaly: Anomaly) -> float | None:
    if anomaly.kind not in TIMED_KINDS or not anomaly.value or not anomaly.baseline:
        return None
    return anomaly.value / anomaly.baseline


def ranks_of(
    anomaly: Anomaly,
    recipe: RecipeConfig,
    local: Mapping[int, RunningRank] | None,
    active: Iterable[Anomaly],
) -> tuple[int, ...] | None:
    """Return the ranks to capture; None for all that are here, or those that a fleet chooses."""
    culprit = anomaly.rank
    if recipe.ranks == "all" or culprit is None:
        return None
    if local is None:
        return (culprit,) if recipe.ranks == "culprit" else None
    return with_peers(anomaly.job_id, {culprit}, recipe, local, active)


def with_peers(
    job: JobId | None,
    culprits: Set[int],
    recipe: RecipeConfig,
    local: Mapping[int, RunningRank],
    active: Iterable[Anomaly],
) -> tuple[int, ...]:
    """Return the culprits, and beside each, if the recipe has peers, the nearest healthy rank.

    It runs here, without an anomaly of it or its GPU.
    """
    others = list(active)
    sick = {other.rank for other in others if other.job_id == job} | culprits
    broken = {other.device for other in others if other.kind in DEVICE_KINDS}
    well = [
        number
        for number, rank in local.items()
        if number not in sick and rank.status == "running" and rank.device not in broken
    ]
    peers = set[int]()
    if well and recipe.ranks == "culprit_and_peer":
        peers = {min(well, key=lambda number: (abs(number - one), number)) for one in culprits}
    return tuple(sorted(culprits | peers))


def _is_repeated(anomaly: Anomaly, captures: Iterable[Capture]) -> bool:
    """Return whether another anomaly of the kind was captured on this job, with some result."""
    return any(
        (capture.request.job_id, capture.request.anomaly_kind) == (anomaly.job_id, anomaly.kind)
        and capture.request.anomaly_id != anomaly.id
        and capture.outcome in ("complete", "partial")
        and capture.time >= anomaly.time - REPEAT_S
        for capture in captures
    )
