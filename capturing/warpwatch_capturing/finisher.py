"""Finishes captures: collects files, verifies and diagnoses them, writes down the cost.

All of it waits for a disk, a network or a child process, in loops of its own. Folders and stacks
are urgent: they do not wait until traces are read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from warpwatch_capturing import child, store, verification
from warpwatch_capturing.confinement import Run, run
from warpwatch_capturing.cost import StepCost
from warpwatch_capturing.participant import Board, Collected, Participant
from warpwatch_capturing.register import RUN_REGRESSION, CaptureRegister
from warpwatch_capturing.session import CaptureSession
from warpwatch_telemetry.captures import Capture, RankCapture

logger = logging.getLogger(__name__)

# Kinds whose files the diagnosis reads.
DIAGNOSED_KINDS = frozenset({"torch", "stacks", "memory"})
# Captures of one owner that may wait to be finished; beyond it they fail.
MAX_WAITING = 64


@dataclass(slots=True)
class _Brought:
    """The results of the ranks of a capture.

    read, baseline: the files for the diagnosis. elsewhere: the ranks whose traces are on another
    node, readable here or not. tries: the unreadable files that may still be left out; large files
    of this node take minutes each.
    """

    ranks: dict[int, RankCapture]
    files: tuple[str, ...] = ()
    read: dict[int, str] = field(default_factory=dict)
    baseline: list[Path] = field(default_factory=list)
    baseline_id: str | None = None
    elsewhere: frozenset[int] = frozenset()
    tries: int = 1


class Finisher:
    """Any thread may call ``create`` and what puts; the rest belongs to the finisher's loops."""

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
        # One owner's slow traces do not delay another's.
        self._urgent, self._work = FairQueue(MAX_WAITING), FairQueue(MAX_WAITING)
        # By the id of a capture without a folder: the function to call if none can be made.
        self._uncreated: dict[str, Callable[[OSError], None]] = {}
        # Ids of captures whose cost waits to be written.
        self._pricing: set[str] = set()

    def create(self, capture: Capture, refuse: Callable[[OSError], None]) -> None:
        """Make the folder of a started capture; ``refuse`` is called from a loop's thread."""
        self._uncreated[capture.id] = refuse
        # If the queue is full, the folder is made when the capture is finished.
        self._urgent.put(capture.request.owner, partial(self._create, capture.id))
        self._wake()

    def write(self, capture: Capture) -> None:
        """Write down what is known of a capture, if it has a folder."""
        self._urgent.put(capture.request.owner, partial(self._register.update, capture.id))
        self._wake()

    def put(self, session: CaptureSession) -> None:
        """Finish the capture of a session that is over."""
        capture = session.capture
        work = self._urgent if capture.request.kind == "stacks" else self._work
        if not work.put(capture.request.owner, partial(self._finish, session)):
            detail = f"{MAX_WAITING} captures of {capture.request.owner} wait to be read"
            self._fail(capture, detail)
            self._count(capture, "failed")
        self._wake()

    def put_cost(self, capture: Capture, cost: StepCost) -> None:
        """Write down what a capture cost: the steps after it are known."""
        self._pricing.add(capture.id)
        if not self._work.put(capture.request.owner, partial(self._price, capture, cost)):
            self._pricing.discard(capture.id)
        self._wake()

    def is_pricing(self, capture_id: str) -> bool:
        """Return whether the capture's cost waits to be written."""
        return capture_id in self._pricing

    def finish(self) -> None:
        """Do all work that waits."""
        while self._urgent.do_next() or self._work.do_next():
            pass

    def finish_urgent(self) -> None:
        """Do the urgent work that waits."""
        while self._urgent.do_next():
            pass

    def _create(self, capture_id: str) -> bool:
        """Return whether the capture goes on. Both loops may call this for the same one."""
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
            # The capture must end in any case.
            logger.exception("capture %s could not be finished", name)
            outcome = "failed"
            self._fail(session.capture, f"{type(error).__name__}: {error}")
        self._count(session.capture, outcome)

    def _fail(self, capture: Capture, detail: str) -> None:
        end = self._wall()
        self._register.update(capture.id, outcome="failed", detail=detail, end_time=end)

    def _count(self, capture: Capture, outcome: str) -> None:
        request = capture.request
        count = self._board.metrics.count_capture
        count(request.kind, request.trigger, outcome, request.owner)

    # --- one capture ---

    def _conclude(self, session: CaptureSession) -> str:
        capture = session.capture
        if capture.folder is None:
            try:
                capture = self._register.create(capture.id)
            except OSError as error:
                return self._leave(session, error)
        folder = Path(str(capture.folder))
        brought = _collect(session, capture, folder)
        self._show(session, brought, end_time=self._wall())
        self._verify(session, brought, folder)
        self._show(session, brought)
        result = self._diagnose(capture, brought, folder)
        outcome = _outcome(brought, result)
        names = child.made_of(
            capture.request.kind, list(brought.read.values()), for_fleet=capture.of_fleet
        )
        made = tuple(name for name in names if (folder / name).is_file())
        brought.files = tuple(dict.fromkeys((*brought.files, *made)))
        detail = _shortcomings(session, brought) or ("" if outcome == "complete" else str(result))
        self._show(
            session,
            brought,
            outcome=outcome,
            detail=detail,
            diagnosis=store.diagnosis_of(replace(capture, ranks=tuple(brought.ranks.values()))),
            diagnosis_outcome=result,
            baseline_id=brought.baseline_id,
        )
        count = f"{sum(map(store.is_usable, brought.ranks.values()))}/{len(brought.ranks)}"
        more = f" ({detail})" if detail else ""
        logger.info("capture %s: %s %s%s; diagnosis: %s", capture.id, outcome, count, more, result)
        return outcome

    def _leave(self, session: CaptureSession, error: OSError) -> str:
        """End a multi-node capture that finds no space here: its traces are on the nodes."""
        logger.error("capture %s is not diagnosed: %s", session.capture.id, error)
        brought = _Brought(session.ranks)
        outcome = _outcome(brought, None)
        details = (_shortcomings(session, brought), f"not diagnosed: {error.strerror}")
        detail = "; ".join(filter(None, details))
        ended = replace(session.shown(), outcome=outcome, detail=detail, end_time=self._wall())
        self._register.keep(ended)
        return outcome

    def _show(self, session: CaptureSession, brought: _Brought, **changes: object) -> None:
        shown = {"detail": _shortcomings(session, brought), "files": brought.files, **changes}
        self._register.update(session.capture.id, ranks=tuple(brought.ranks.values()), **shown)

    def _verify(self, session: CaptureSession, brought: _Brought, folder: Path) -> None:
        expected = {
            name: expectation
            for one in session.participants
            for number in one.ranks
            if (name := brought.read.get(number))
            and (expectation := one.expectation(number)) is not None
        }
        verdicts = verification.verify(folder, expected, run=self._run) if expected else {}
        for number, name in list(brought.read.items()):
            verdict = verdicts.get(name)
            if verdict is None:
                continue
            self._count_problems(verdict.problems)
            brought.ranks[number] = rank = replace(
                brought.ranks[number],
                verified=not verdict.problems,
                problems=verdict.problems,
                events=verdict.events,
            )
            if not store.is_usable(rank):
                del brought.read[number]

    def _count_problems(self, problems: Iterable[str]) -> None:
        counter = self._board.metrics.counter("capture_problems_total")
        for problem in problems:
            counter.labels(problem.partition(":")[0]).inc()

    def _diagnose(self, capture: Capture, brought: _Brought, folder: Path) -> str | None:
        """Return the result as ``child.diagnose``, None for a kind that has no diagnosis.

        A file that cannot be read is left out, and the rest is read again.
        """
        kind = capture.request.kind
        if kind not in DIAGNOSED_KINDS:
            return None
        if brought.read:
            self._choose_baseline(capture, brought)
        while brought.read:
            ranks = list(brought.ranks.values())
            result = child.diagnose(
                kind, folder, list(brought.read.values()), store.missing_ranks(ranks),
                brought.baseline, store.nodes_of(ranks), child.asked(capture.request), self._run,
            )  # fmt: skip
            if result == "ok" or not self._is_reduced(brought, result):
                return result
        unreadable = [rank.problems[-1] for rank in brought.ranks.values() if rank.problems]
        return unreadable[0] if unreadable and not brought.elsewhere else "no files"

    def _is_reduced(self, brought: _Brought, result: str) -> bool:
        """Leave out the file that the result names, else the baseline. Return whether one is left.

        Files of this node's baseline have the same names as those of the capture.
        """
        named = [path for path in brought.baseline if result.startswith(_about(path.name))]
        is_of_rank = any(map(result.startswith, map(_about, brought.read.values())))
        if brought.elsewhere and named:
            brought.baseline = [path for path in brought.baseline if path not in named]
        elif brought.baseline and not (brought.elsewhere and is_of_rank):
            # With a baseline that has gone, or is too much to read, it is still a diagnosis.
            brought.baseline, brought.baseline_id = [], None
        else:
            return self._is_dropped(brought, result)
        return True

    def _is_dropped(self, brought: _Brought, result: str) -> bool:
        """Leave out the rank whose file the result names, if it names one."""
        for number, name in brought.read.items() if brought.tries else ():
            if result.startswith(_about(name)):
                why = result.removeprefix(_about(name))
                brought.ranks[number] = rank = store.unread(brought.ranks[number], why)
                self._count_problems(rank.problems[-1:])
                del brought.read[number]
                brought.tries -= 1
                return True
        return False

    def _choose_baseline(self, capture: Capture, brought: _Brought) -> None:
        """Compare with the traces of the job's own baseline, in the store."""
        request = capture.request
        if request.kind != "torch" or request.trigger == "baseline" or brought.elsewhere:
            return
        found = self._register.baseline(request.job_id, capture.time)
        if request.anomaly_kind == RUN_REGRESSION or (not found and request.trigger == "schedule"):
            found = self._register.earlier_baseline(request.job_id, capture.time)
        if found is not None:
            names = store.verified_files(found.ranks)
            brought.baseline = [Path(str(found.folder)) / name for name in names]
            brought.baseline_id = found.id if names else None

    # --- its cost ---

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


def _collect(session: CaptureSession, capture: Capture, folder: Path) -> _Brought:
    work = [(one, number) for one in session.participants for number in one.ranks]
    fetches = max(one.fetches for one in session.participants)
    with ThreadPoolExecutor(fetches, "ww-collect") as pool:
        found = list(pool.map(lambda one: _collect_rank(capture, one[0], one[1], folder), work))
    found.sort(key=lambda one: one.rank.rank)
    elsewhere = [n for one, n in work if one.node and store.is_usable(one.ranks[n])]
    return _Brought(
        {one.rank.rank: one.rank for one in found},
        tuple(name for one in found for name in one.files),
        {one.rank.rank: one.read for one in found if one.read is not None},
        [folder / one.baseline for one in found if one.baseline is not None],
        elsewhere=frozenset(elsewhere),
        tries=max(1, len(elsewhere)),
    )


def _collect_rank(capture: Capture, one: Participant, number: int, folder: Path) -> Collected:
    try:
        return one.collect(number, folder)
    except Exception as error:
        # A fault with one rank's files does not affect the others.
        logger.exception("capture %s: rank %d", capture.id, number)
        detail = f"{type(error).__name__}: {error}"
        return Collected(replace(one.ranks[number], state="failed", detail=detail))


def _about(name: str) -> str:
    """Return how a result about this file begins."""
    return f"{child.UNREADABLE}{name}: "


def _outcome(brought: _Brought, diagnosis: str | None) -> str:
    """Return ``complete`` if every rank's file is there and could be read.

    ``diagnosis``: the result of the diagnosis.
    """
    whole = sum(map(store.is_usable, brought.ranks.values()))
    if brought.elsewhere:
        is_complete = whole == len(brought.ranks) and diagnosis in (None, "ok")
        return "complete" if is_complete else "partial"
    if diagnosis == "no_memory":
        return diagnosis
    if not whole or (diagnosis or "").startswith(child.UNREADABLE):
        return "failed"
    return "complete" if whole == len(brought.ranks) and diagnosis in (None, "ok") else "partial"


def _shortcomings(session: CaptureSession, brought: _Brought) -> str:
    found: Sequence[str] = [
        text
        for one in session.participants
        for text in one.shortcomings([brought.ranks[number] for number in one.ranks])
    ]
    return "; ".join(found)


Work = Callable[[], object]


class FairQueue:
    """A queue that is fair to owners. All methods are thread-safe."""

    def __init__(self, most_per_owner: int) -> None:
        self._most = most_per_owner
        self._lock = threading.Lock()
        # By owner, the next one first.
        self._waiting: dict[str, deque[Work]] = {}

    def put(self, owner: str, work: Work) -> bool:
        """Return False, and drop the work, if too much work of the owner waits."""
        with self._lock:
            of_owner = self._waiting.setdefault(owner, deque())
            if len(of_owner) >= self._most:
                return False
            of_owner.append(work)
            return True

    def do_next(self) -> bool:
        """Do the next work; return False if there is none."""
        with self._lock:
            if not self._waiting:
                return False
            owner, of_owner = next(iter(self._waiting.items()))
            del self._waiting[owner]
            work = of_owner.popleft()
            if of_owner:
                self._waiting[owner] = of_owner
        work()
        return True
