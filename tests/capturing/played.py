"""A capture service whose participants the test plays: what they answer, and when."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tests.daemon.captures.capture_node import read_here
from tests.manual_clock import ManualClock
from warpwatch_capturing.config import StoreConfig, TriggersConfig
from warpwatch_capturing.participant import Collected, LiveJob, Participant, Reach, is_over
from warpwatch_capturing.policy import NoLimits
from warpwatch_capturing.register import CaptureRegister
from warpwatch_capturing.service import CaptureService
from warpwatch_capturing.store import Store
from warpwatch_daemon.state.hub import Hub
from warpwatch_telemetry.captures import Capture, CaptureRequest, Prepared, RankCapture
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent

JOB = JobId("a", "train", "r1")
REQUEST = CaptureRequest("train", "torch", "manual", steps=3)


class Played(Participant):
    """Two ranks of a node. The test sets ``ranks``, ``lost`` and the answers.

    requests: all of them, in order.
    """

    reach = Reach(2.0, 4, (0.1, 1.0))

    def __init__(self, node: str, numbers: Iterable[int]) -> None:
        super().__init__(numbers)
        self.node = node
        self.requests: list[str] = []

    def prepare(self, request: CaptureRequest, at: float) -> None:
        self.requests.append("prepare")
        self.is_awaited, self.answer = True, None

    def arm(self, capture: Capture, attempt: int, at: float) -> None:
        self.requests.append(f"arm {attempt}: {capture.start_step}")
        self.is_awaited, self.answer = True, None

    def withdraw(self) -> None:
        self.requests.append("withdraw")
        self.set_all("asked")

    def cancel(self, detail: str = "") -> None:
        self.requests.append(f"cancel {detail}".strip())
        for number, rank in self.ranks.items():
            if detail and not is_over(rank):
                self.ranks[number] = replace(rank, state="missing", detail=detail)

    def observe(self, event: RankEvent | End, at: float) -> None:
        """Nothing runs here."""

    def advance(self, at: float) -> None:
        """The test does it."""

    @property
    def is_over(self) -> bool:
        return bool(self.lost) or all(map(is_over, self.ranks.values()))

    def has_passed(self, number: int, start_step: int, at: float) -> bool:
        return False

    def _fetched(self, rank: RankCapture, folder: Path) -> Collected:
        return Collected(replace(rank, state="written") if rank.state == "exported" else rank)

    def expectation(self, number: int) -> None:
        return None

    def answers(self, answer: Prepared | Exception | None = None) -> None:
        self.is_awaited, self.answer = False, answer

    def set_all(self, state: str, detail: str = "") -> None:
        for number, rank in self.ranks.items():
            self.ranks[number] = replace(rank, state=state, detail=detail)


class Places:
    """Two nodes with two ranks each."""

    is_local = False

    def __init__(self) -> None:
        self.newest: list[Played] = []

    def jobs(self) -> list[LiveJob]:
        return [LiveJob(JOB, range(4), 4)]

    def choose(self, job: LiveJob, request: CaptureRequest) -> Collection[int]:
        return job.ranks

    def of(
        self, job: LiveJob, numbers: Collection[int], request: CaptureRequest
    ) -> Sequence[Played]:
        self.newest = [Played("gpu-1", (0, 1)), Played("gpu-2", (2, 3))]
        return self.newest


class PlayedService:
    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        self.store = Store(StoreConfig(url=folder.as_uri()))
        self.places, hub = Places(), Hub(10.0)
        self.service = CaptureService(
            NoLimits(TriggersConfig()),
            CaptureRegister(self.store, hub),
            self.places,
            hub,
            lambda busy: None,
            lambda: None,
            self.clock.monotonic,
            self.clock.wall,
            read_here,
        )

    def ask(self, request: CaptureRequest = REQUEST) -> tuple[Capture, Played, Played]:
        """The capture and its two participants, which have been asked."""
        capture = self.service.request(request)
        first, second = self.places.newest
        return capture, first, second

    def step(self, after_s: float = 0.0) -> bool:
        self.clock.advance(after_s)
        return self.service.advance(self.clock.monotonic())

    def capture(self, asked: Capture) -> Capture:
        found = self.service.register.get(asked.id)
        assert found is not None
        return found

    def finished(self, asked: Capture) -> Capture:
        self.step()
        self.service.finish()
        return self.capture(asked)
