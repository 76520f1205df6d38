"""What of a capture touches a disk or waits for a child, in loops of their own.

Its folder, its files into the store, their verification, the diagnosis, the price. Folders and
stacks are urgent: they do not wait until traces are read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from warpwatch_capturing import usable
from warpwatch_capturing.board import Board
from warpwatch_capturing.children import child, verification
from warpwatch_capturing.children.confinement import Run, run
from warpwatch_capturing.children.verification import UNREADABLE, TraceVerdict
from warpwatch_capturing.cost import StepCost
from warpwatch_capturing.fair_queue import FairQueue
from warpwatch_capturing.register import RUN_REGRESSION, CaptureRegister
from warpwatch_capturing.session import CaptureSession
from warpwatch_capturing.store import diagnosis_of
from warpwatch_telemetry.captures import Capture, RankCapture

logger = logging.getLogger(__name__)

# Kinds whose files the diagnosis reads.
DIAGNOSED_KINDS = frozenset({"torch", "stacks", "memory"})
# Ranks of which stacks are taken at once.
STACKS_AT_ONCE = 8
# Captures of one owner that may wait to be finished; beyond it they fail.
MAX_WAITING = 64


class Finisher:
    """``create`` and what puts may be called from any thread, the others from their loops."""

    def __init__(
        self,
        register: CaptureRegister,
        board: Board,
        wake: Callable[[], None],
        wall: Callable[[], float] = time.time,
        run: Run = run,
    ) -> None:
        self._register = register
        self._board = board
        self._wake = wake
        self._wall = wall
        self._run = run
        # One owner's slow traces hold up no other's.
        self._urgent, self._work = FairQueue(MAX_WAITING), FairQueue(MAX_WAITING)
        # By the id of a capture that has no folder yet: who is to know when there can be none.
        self._uncreated: dict[str, Callable[[OSError], None]] = {}
        # Ids of captures whose price waits to be written.
        self._pricing: set[str] = set()

    def create(self, capture: Capture, refuse: Callable[[OSError], None]) -> None:
        """The capture was begun: make its folder, or say from a loop's thread why there is none."""
        self._uncreated[capture.id] = refuse
        # Finishing it makes the folder too, where there is no room for this.
        self._urgent.put(capture.request.owner, partial(self._create, capture.id))
        self._wake()

    def put(self, session: CaptureSession) -> None:
        """The session is over: finish its capture."""
        capture = session.capture
        work = self._urgent if capture.request.kind == "stacks" else self._work
        if not work.put(capture.request.owner, partial(self._finish, session)):
            detail = f"{MAX_WAITING} captures of {capture.request.owner} wait to be read"
            self._register.update(capture.id, outcome="failed", detail=detail)
            self._count(capture, "failed")
        self._wake()

    def put_cost(self, capture: Capture, cost: StepCost) -> None:
        """The steps after the capture are known: write down what it cost."""
        self._pricing.add(capture.id)
        if not self._work.put(capture.request.owner, partial(self._price, capture, cost)):
            self._pricing.discard(capture.id)
        self._wake()

    def is_pricing(self, capture_id: str) -> bool:
        return capture_id in self._pricing

    def finish(self) -> None:
        while self._urgent.do_next() or self._work.do_next():
            pass

    def finish_urgent(self) -> None:
        while self._urgent.do_next():
            pass

    def _create(self, capture_id: str) -> bool:
        """Whether the capture has a folder. Both loops may come here for the same one."""
        if capture_id not in self._uncreated:
            return self._register.is_running(capture_id)
        try:
            self._register.create(capture_id)
        except OSError as error:
            refuse = self._uncreated.pop(capture_id, None)
            if refuse is None:
                return self._register.is_running(capture_id)
            refuse(error)
            return False
        self._uncreated.pop(capture_id, None)
        return True

    def _finish(self, session: CaptureSession) -> None:
        name = session.capture.id
        try:
            if not self._create(name):
                return
            outcome = self._conclude(session)
        except Exception as error:
            # Whatever it was, the capture must end.
            logger.exception("capture %s could not be finished", name)
            outcome = "failed"
            self._register.update(name, outcome=outcome, detail=f"{type(error).__name__}: {error}")
        self._count(session.capture, outcome)

    def _count(self, capture: Capture, outcome: str) -> None:
        request = capture.request
        count = self._board.metrics.count_capture
        count(request.kind, request.trigger, outcome, request.owner)

    def _conclude(self, session: CaptureSession) -> str:
        """The outcome; the capture is complete when every rank's file is there and readable."""
        capture = session.capture
        folder = Path(str(capture.folder))
        ranks, files = _collect(session, folder)
        now = self._wall()
        self._register.update(capture.id, ranks=ranks, end_time=now, files=files)
        ranks = self._verified(session, ranks, folder)
        self._register.update(capture.id, ranks=ranks, detail=_shortcomings(ranks))
        result, baseline_id = self._diagnose(capture, folder, ranks)
        blamed = self._without_unread(ranks, result)
        if blamed != ranks:
            # Whose trace cannot be read costs the others no diagnosis, but is tried only once.
            ranks = blamed
            result, baseline_id = self._diagnose(capture, folder, ranks)
        outcome = _outcome(ranks, result)
        detail = _shortcomings(ranks) or ("" if outcome == "complete" else str(result))
        brought = [rank.file for rank in ranks if rank.file]
        names = child.made_of(capture.request.kind, brought, for_fleet=capture.of_fleet)
        made = tuple(name for name in names if (folder / name).is_file())
        self._register.update(
            capture.id,
            ranks=ranks,
            outcome=outcome,
            detail=detail,
            files=files + made,
            diagnosis=diagnosis_of(capture),
            diagnosis_outcome=result,
            baseline_id=baseline_id,
        )
        count = f"{sum(map(usable.is_usable, ranks))}/{len(ranks)}"
        more = f" ({detail})" if detail else ""
        logger.info("capture %s: %s %s%s; diagnosis: %s", capture.id, outcome, count, more, result)
        return outcome

    def _verified(
        self, session: CaptureSession, ranks: Sequence[RankCapture], folder: Path
    ) -> tuple[RankCapture, ...]:
        """The ranks with what the traces that they brought lack; every problem is counted."""
        expected = {
            rank.file: expectation
            for rank in ranks
            if rank.file and (expectation := session.expectation(rank.rank)) is not None
        }
        verdicts = verification.verify(folder, expected, run=self._run) if expected else {}
        self._count_problems(p for verdict in verdicts.values() for p in verdict.problems)
        return tuple(_with_verdict(rank, verdicts) for rank in ranks)

    def _without_unread(
        self, ranks: tuple[RankCapture, ...], result: str | None
    ) -> tuple[RankCapture, ...]:
        """The rank whose trace the diagnosis could not read is marked so, and counted."""
        for index, rank in enumerate(ranks):
            about = f"{child.UNREADABLE}{rank.file}: "
            if rank.file and usable.is_usable(rank) and result and result.startswith(about):
                problem = f"{UNREADABLE}: {result.removeprefix(about)}"
                self._count_problems([problem])
                unread = replace(rank, verified=False, problems=(*rank.problems, problem))
                return (*ranks[:index], unread, *ranks[index + 1 :])
        return ranks

    def _count_problems(self, problems: Iterable[str]) -> None:
        counter = self._board.metrics.counter("capture_problems_total")
        for problem in problems:
            counter.labels(problem.partition(":")[0]).inc()

    def _diagnose(
        self, capture: Capture, folder: Path, ranks: Sequence[RankCapture]
    ) -> tuple[str | None, str | None]:
        """What became of the diagnosis, as ``child.diagnose`` says it; None: there is none.

        And the id of the capture that it compares with.
        """
        kind = capture.request.kind
        if kind not in DIAGNOSED_KINDS:
            return None, None
        files = usable.files(ranks)
        if not files:
            unreadable = [rank.problems[-1] for rank in ranks if rank.file]
            return unreadable[0] if unreadable else "no files", None
        missing = usable.missing(ranks)
        baseline, asked = self._baseline(capture), child.asked(capture.request)
        diagnose = partial(child.diagnose, run=self._run)
        if baseline is not None:
            of_baseline = usable.verified_files(baseline.ranks)
            traces = [Path(str(baseline.folder)) / name for name in of_baseline]
            if traces and diagnose(kind, folder, files, missing, traces, asked=asked) == "ok":
                return "ok", baseline.id
        # With a baseline that has gone, or is too much to read, it is still a diagnosis.
        return diagnose(kind, folder, files, missing, asked=asked), None

    def _baseline(self, capture: Capture) -> Capture | None:
        request = capture.request
        if request.kind != "torch" or request.trigger == "baseline":
            return None
        if request.anomaly_kind == RUN_REGRESSION:
            return self._register.earlier_baseline(request.job_id, capture.time)
        last = self._register.baseline(request.job_id, capture.time)
        if last is None and request.trigger == "schedule":
            return self._register.earlier_baseline(request.job_id, capture.time)
        return last

    def _price(self, capture: Capture, cost: StepCost) -> None:
        try:
            self._note_cost(capture, cost)
        finally:
            self._pricing.discard(capture.id)

    def _note_cost(self, capture: Capture, cost: StepCost) -> None:
        residual, cost_s = cost.residual(), cost.cost_s()
        changes = {"step_s": cost.medians(), "cost_s": cost_s, "residual": residual}
        self._register.update(capture.id, **changes)
        if cost_s is not None:
            costs = self._board.metrics.counter("capture_cost_seconds_total")
            costs.labels(capture.request.kind).inc(max(0.0, cost_s))
        if residual is not None:
            self._register.publish_residuals()
        if residual is not None and residual.slower:
            logger.warning(
                "since capture %s the steps of %s take %.0f %% longer (%d steps before and after)",
                capture.id,
                capture.request.job,
                100 * (residual.ratio - 1),
                residual.steps,
            )


def _collect(
    session: CaptureSession, folder: Path
) -> tuple[tuple[RankCapture, ...], tuple[str, ...]]:
    at_once = STACKS_AT_ONCE if session.capture.request.kind == "stacks" else 1
    with ThreadPoolExecutor(at_once, "ww-collect") as pool:
        collected = list(pool.map(partial(_collect_one, session, folder), session.ranks))
    ranks = tuple(rank for rank, _ in collected)
    return ranks, tuple(name for _, names in collected for name in names)


def _collect_one(
    session: CaptureSession, folder: Path, number: int
) -> tuple[RankCapture, tuple[str, ...]]:
    """A fault with one rank's files costs the others nothing."""
    try:
        return session.collect(number, folder)
    except Exception as error:
        logger.exception("capture %s: rank %d", session.capture.id, number)
        detail = f"{type(error).__name__}: {error}"
        return replace(session.ranks[number], state="failed", detail=detail), ()


def _with_verdict(rank: RankCapture, verdicts: Mapping[str, TraceVerdict]) -> RankCapture:
    verdict = verdicts.get(rank.file or "")
    if verdict is None:
        return rank
    return replace(
        rank, verified=verdict.verified, problems=verdict.problems, events=verdict.events
    )


def _outcome(ranks: Sequence[RankCapture], diagnosis: str | None) -> str:
    """The capture is complete when every rank's file is there and could be read.

    ``diagnosis``: what became of it.
    """
    brought = sum(map(usable.is_usable, ranks))
    if diagnosis == "no_memory":
        return diagnosis
    if not brought or (diagnosis or "").startswith(child.UNREADABLE):
        return "failed"
    return "complete" if brought == len(ranks) and diagnosis in (None, "ok") else "partial"


def _shortcomings(ranks: Sequence[RankCapture]) -> str:
    return "; ".join(filter(None, map(_shortcoming, ranks)))


def _shortcoming(rank: RankCapture) -> str:
    if rank.state != "written":
        return f"rank {rank.rank}: {rank.detail or rank.state}"
    return f"rank {rank.rank} is not verified ({'; '.join(rank.problems)})" if rank.problems else ""
