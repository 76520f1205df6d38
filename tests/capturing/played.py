"""A capture service whose participants a story plays, and the journal of all that it does."""

import json
import logging
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from tests import expressions
from tests.manual_clock import ManualClock
from warpwatch_capturing import participant, store
from warpwatch_capturing.config import StoreConfig, TriggersConfig
from warpwatch_capturing.confinement import Ended
from warpwatch_capturing.participant import Collected, LiveJob, Participant, is_over
from warpwatch_capturing.policy import NoLimits
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.verification import Expectation
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry import captures
from warpwatch_telemetry.captures import Capture, CaptureRequest, Prepared, RankCapture
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, Step
from warpwatch_telemetry.state import RankState

JOB = JobId("uid/7", "train", "r1")
REQUEST = CaptureRequest("train", "torch", "manual", steps=3)
JOB_OF = {"owner": JOB.owner, "run": JOB.run}
_ID = re.compile(r"\d{8}T\d{6}-[0-9a-f]{6}")
Say = Callable[[str], None]


class Played(Participant):
    """Two ranks of a place. The story sets ``ranks``, ``lost`` and the answers.

    brings: by rank what it has in the end, or an error of the transfer. passed: the ranks that
    cannot record the start step any more.
    """

    reach = participant.Reach(2.0, 4, (0.1, 1.0))

    def __init__(self, node: str | None, numbers: Iterable[int], say: Say) -> None:
        super().__init__(numbers)
        self.node = node
        self._say: Say = lambda text: say(f"{node or 'here'}: {text}")
        self.brings: dict[int, Collected | Exception] = {}
        self.expected: dict[int, Expectation] = {}
        self.passed: set[int] = set()

    def prepare(self, request: CaptureRequest, at: float) -> None:
        self._say(f"prepare {request.kind}, {request.steps} steps {request.run} at {at:g}")
        self.is_awaited, self.answer = self.node is not None, None
        if self.node is None:
            self.answer = Prepared((0, 1), 3, 40, 0.1)

    def arm(self, capture: Capture, attempt: int, at: float) -> None:
        steps = f"{capture.steps} steps from {capture.start_step}"
        self._say(f"arm {attempt}: {steps} {capture.request.options} at {at:g}")
        self.is_awaited, self.answer = self.node is not None, None

    def withdraw(self) -> None:
        self._say("withdraw")
        self.set("asked")

    def cancel(self, detail: str = "") -> None:
        self._say(f"cancel {detail}")
        for number, rank in self.ranks.items():
            if detail and not is_over(rank):
                self.ranks[number] = replace(rank, state="missing", detail=detail)

    def observe(self, event: RankEvent | End, at: float) -> None:
        self._say(f"{getattr(event, 'event', 'end')} of {event.rank} at {at:g}")

    def advance(self, at: float) -> None:
        """The story does it."""

    @property
    def is_over(self) -> bool:
        return bool(self.lost) or all(map(is_over, self.ranks.values()))

    def has_passed(self, number: int, start_step: int, at: float) -> bool:
        return number in self.passed

    def _fetched(self, rank: RankCapture, folder: Path) -> Collected:
        found = self.brings.get(rank.rank, Collected(rank))
        if isinstance(found, Exception):
            raise found
        for name in found.files:
            (folder / name).write_text("{}")
        return found

    def expectation(self, number: int) -> Expectation | None:
        return self.expected.get(number)

    def answers(self, answer: Prepared | Exception | None = None) -> None:
        self.is_awaited, self.answer = False, answer

    def set(self, state: str, detail: str = "", *ranks: int, **more: Any) -> None:
        for number in ranks or self.ranks:
            rank = replace(self.ranks[number], state=state, detail=detail, **more)
            self.ranks[number] = rank

    def bring(self, *ranks: int, **more: Any) -> None:
        """The ranks, else all, have their traces, which are to be fetched and verified."""
        for number in ranks or self.ranks:
            name = f"rank{number}.pt.trace.json.gz"
            state = "exported" if self.node is None else "written"
            self.set(state, "", number, file=name, node=self.node, **more)
            written = replace(self.ranks[number], state="written")
            self.brings[number] = Collected(written, (name,), name)
            self.expected[number] = Expectation(number)


class Board:
    """What the service shows: the journal has each difference of the captures."""

    def __init__(self, say: Say, running: Callable[[], tuple[RankState, ...]]) -> None:
        self.metrics, self.ranks = AgentMetrics(), running
        self._say, self.shown = say, dict[str, dict[str, Any]]()

    def publish(self, **parts: Any) -> None:
        now = {one.id: _flat(one) for one in parts["captures"]}
        if list(now) != list(self.shown):
            self._say(f"shown: {' '.join(now)}")
        for ident, after in now.items():
            before = self.shown.get(ident, {})
            said = [f"{key}={after.get(key)}" for key in before | after
                    if after.get(key) != before.get(key)]  # fmt: skip
            if said:
                self._say(" ".join([ident, *said]))
        self.shown = now


def _flat(one: Capture) -> dict[str, Any]:
    """Return the fields of a capture that are set, each rank as one."""
    fields = asdict(one) | {"id": None, "request": one.request.reason, "ranks": None}
    for rank in one.ranks:
        known = {key: value for key, value in asdict(rank).items() if value not in (None, "", ())}
        fields[f"rank{known.pop('rank')}"] = ",".join(map(str, known.values()))
    return {key: value for key, value in fields.items() if value not in (None, "", (), {}, 0)}


class Limits(NoLimits):
    """A policy without limits but those that the story sets. refusal: what ``check`` raises."""

    def __init__(self, say: Say) -> None:
        super().__init__(TriggersConfig())
        self._say, self.refusal = say, dict[str, Refused]()

    def check(self, request: CaptureRequest, busy: Collection[int], at: float) -> None:
        self._say(f"check {request.kind} of {request.owner}, busy {sorted(busy)}, at {at:g}")
        if request.kind in self.refusal:
            raise self.refusal[request.kind]

    def add_start(self, request: CaptureRequest, at: float) -> None:
        self._say(f"count {request.kind} of {request.owner} at {at:g}")

    def remove_start(self, request: CaptureRequest, at: float) -> None:
        self._say(f"uncount {request.kind} of {request.owner} at {at:g}")


class Counted:
    """A lock that counts how often it is taken."""

    def __init__(self, lock: Any) -> None:
        self._lock, self.times = lock, 0

    def __enter__(self) -> None:
        self._lock.acquire()
        self.times += 1

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Story(logging.Handler):
    """The service of a fleet over two nodes of two ranks each, or of one node with two ranks.

    ``first`` and ``second``: the participants of the newest capture. ended: by the beginning of a
    file's name and the letter v or d, how its verification and diagnosis end.
    """

    def __init__(self, folder: Path, is_local: bool) -> None:
        super().__init__(logging.INFO)
        self.is_local, self._folder, self.clock = is_local, folder, ManualClock()
        self.lines: list[str] = []
        self.ended: dict[str, Ended] = {}
        self.jobs_here = [LiveJob(JOB, range(2 if is_local else 4), 4)]
        self.running: tuple[RankState, ...] = ()
        self._metrics: dict[str, float] = {}
        self._behind: dict[str, str] = {}
        self._locks: dict[str, Counted] = {}
        self._names: dict[str, str] = {}
        self.restart()

    def restart(self, **config: Any) -> None:
        self.store = store.Store(StoreConfig(url=self._folder.as_uri(), **config))
        self.board, self.policy = Board(self.say, lambda: self.running), Limits(self.say)
        self.service = CaptureService(
            self.policy, CaptureRegister(self.store, self.board, self.clock.wall), self, self.board,
            lambda busy: self.say(f"hurry {busy}"), lambda: self.say("wake"),
            self.clock.monotonic, self.clock.wall, self.run,
        )  # fmt: skip

    def say(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def emit(self, record: logging.LogRecord) -> None:
        self.say(f"{record.levelname.lower()}: {record.getMessage()}")

    def count_locks(self) -> None:
        """Tell from now on which locks each move takes, and how often."""
        queues = self.service._finisher
        parts = {"service": self.service, "register": self.service.register}
        for part, one in {**parts, "urgent": queues._urgent, "work": queues._work}.items():
            for name in sorted({"_lock", "_saving"} & vars(one).keys()):
                counted = self._locks[part + name] = Counted(vars(one)[name])
                setattr(one, name, counted)

    # --- the places ---

    def jobs(self) -> list[LiveJob]:
        return self.jobs_here

    def choose(self, job: LiveJob, request: CaptureRequest) -> Collection[int]:
        return job.ranks

    def of(
        self, job: LiveJob, numbers: Collection[int], request: CaptureRequest
    ) -> Sequence[Played]:
        self.say(f"of {job.id.run}: {list(numbers)}")
        nodes = {None: (0, 1)} if self.is_local else {"gpu-1": (0, 1), "gpu-2": (2, 3)}
        found = [Played(node, ranks, self.say) for node, own in nodes.items()
                 if (ranks := set(own) & set(numbers))]  # fmt: skip
        self.first, self.second = found[0], found[-1]
        return found

    def run(self, module: str, arguments: Sequence[str], timeout_s: float, fds: Any) -> Ended:
        """Read nothing, and answer what the story has set; the diagnosis is of one word."""
        is_diagnosis = module.endswith("child")
        said = list(arguments[1:] if is_diagnosis else arguments)
        if is_diagnosis:
            about = json.loads(said[1])
            said[1] = str({key: about[key] for key in about if about[key] and key != "outputs"})
        elif said[1:]:
            said[1] = str({key: value for key, value in json.loads(said[1]).items() if value})
        self.say(f"{module.rpartition('.')[2]} {' '.join(said)}")
        for part, ended in self.ended.items():
            if part[0] == "vd"[is_diagnosis] and any(f"/{part[1:]}" in one for one in said):
                return ended
        if is_diagnosis:
            Path(f"/proc/self/fd/{fds[0]}").write_text('{"verdict": "healthy", "traces": []}')
        return Ended(0, () if is_diagnosis else ("[6, []]",))

    # --- the moves ---

    def ask(self, name: str = "", start_step: int | None = None, **changes: Any) -> None:
        self.service.request(replace(REQUEST, **changes), name, start_step)

    def step(self, after_s: float = 0.0) -> None:
        self.clock.advance(after_s)
        self.service.advance(self.clock.monotonic())

    def trains(self, times: int, duration_s: float = 0.1, rank: int = 0, **more: Any) -> None:
        for number in range(times):
            self.service.observe(Step(0.0, JOB.name, rank, number, duration_s, **JOB_OF | more))

    def all(self, *calls: tuple[Any, ...]) -> None:
        """Call methods of both participants."""
        for one in (self.first, self.second):
            expressions.play(one, *calls)

    def told(self, moves: Sequence[str]) -> str:
        """Make the moves; return each with all that came of it."""
        known: dict[str, Any] = vars(expressions) | vars(captures) | vars(participant) | globals()
        for move in moves:
            self.lines.append(move)
            own = {name: getattr(self, name) for name in dir(self) if name[0] != "_"}
            own |= {"story": self, "newest": next(reversed(self.service.captures()), None)}
            value = expressions.tried(partial(eval, move, known | own))
            if value is not None:
                self.say(f"-> {value.id if isinstance(value, Capture) else value}")
            if self._locks:
                self.say(", ".join(f"{name} {lock.times}" for name, lock in self._locks.items()))
            for lock in self._locks.values():
                lock.times = 0
            self._tell_metrics()
            self._tell_files()
        return self._plain("".join(f"{line}\n" for line in self.lines))

    def _tell_metrics(self) -> None:
        before, self._metrics = self._metrics, {}
        for family in self.board.metrics.registry.collect():
            for one in family.samples:
                name = f"{one.name.removeprefix('warpwatch_')} {'/'.join(one.labels.values())}"
                if one.value and re.match("(captures?|store)_(?!.*_created)", name):
                    self._metrics[name] = one.value
        for name in before | self._metrics:
            if self._metrics.get(name) != before.get(name):
                self.say(f"{name}: {self._metrics.get(name, 'none')}")

    def _tell_files(self) -> None:
        """Tell which fields of captures differ on disk from what is shown."""
        for one in self.service.captures():
            path, now = Path(one.folder or "/none") / store.RECORD, _flat(one)
            written = _flat(store.parse(path.read_bytes())) if path.exists() else {}
            late = {key for key in now if now[key] != written.get(key)} - {"folder", "diagnosis"}
            behind = " ".join(sorted(late)) if written else ""
            if behind != self._behind.get(one.id, ""):
                self.say(f"{one.id} on disk is behind: {behind or 'no more'}")
            self._behind[one.id] = behind

    def _plain(self, text: str) -> str:
        """Return the text with names in place of what differs from run to run."""
        text = text.replace(str(self._folder), "/store")
        return _ID.sub(lambda ident: self._names.setdefault(ident[0], f"c{len(self._names)}"), text)
