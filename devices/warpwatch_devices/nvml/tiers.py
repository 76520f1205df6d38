"""Decides when each reader of a device runs: every round, rarely, or once, by its cost.

Slowly changing values are read at long intervals and kept in between. The rounds of slow readers
are spread over readers and devices, so that they never coincide. An expensive reader of every round
becomes a slow one.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from warpwatch_devices.nvml.library import (
    CallCosts,
    DeviceGone,
    Meaning,
    classify,
    code_of,
    meaning_of,
    reason_of,
)
from warpwatch_telemetry.metric import Values

logger = logging.getLogger(__name__)


# Seconds between two readings, by how soon a change matters.
SLOW_S = 10.0
SLOWER_S = 30.0
RARE_S = 60.0
ONCE = math.inf
# Shorter rounds count as this long, so that the cost of a round stays the same.
_LEAST_ROUND_S = 1.0
# A reader of every round whose median cost is above this becomes a slow one.
DEAR_S = 0.005
_JUDGED_READINGS = 5


def rounds_of(period_s: float, interval_s: float) -> int:
    """Return the number of rounds between two readings ``period_s`` apart."""
    return max(1, round(period_s / max(interval_s, _LEAST_ROUND_S)))


@dataclass(slots=True, eq=False)
class TimedReader:
    """A reader that runs every ``period_s`` seconds; 0 means every round.

    ``name`` is its label in nvml_calls_total; readers of the same kind share one. With
    ``instead_of`` it runs only on devices that lack this field. ``calls`` and ``refusals`` (return
    codes of single values) are those of the last reading.
    """

    name: str
    read: Callable[[Any], Values]
    period_s: float = 0.0
    instead_of: int = 0
    calls: int = 1
    refusals: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Turn:
    """A reader and its state; ``rounds`` is 0 if it runs only once."""

    reader: TimedReader
    phase: int
    rounds: int
    values: Values = field(default_factory=dict)
    costs_s: list[float] = field(default_factory=list)

    def due(self, round_number: int) -> bool:
        if self.rounds == 1 or round_number == 0:
            return True
        return self.rounds > 0 and (round_number + self.phase) % self.rounds == 0


class Schedule:
    """The readers of one device, with rounds of ``interval_s``, while its handle is valid.

    ``supports`` returns whether the device supports a field, or None if that is unknown. ``denied``
    has the readers already reported as not permitted.
    """

    def __init__(
        self,
        readers: Iterable[TimedReader],
        phase: int,
        costs: CallCosts,
        supports: Callable[[int], bool | None],
        denied: set[str],
        interval_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._interval_s = interval_s
        self._turns = [
            _Turn(r, phase + i, 0 if r.period_s == ONCE else self._rounds(r.period_s))
            for i, r in enumerate(readers)
        ]
        self._costs = costs
        self._supports = supports
        self._denied = denied
        self._refused: set[str] = set()
        self._round = 0
        # The newest values of the slow readers.
        self._standing: Values = {}

    def read(self, handle: Any) -> Values:
        """Return all values of this round. Raises DeviceGone if no due reader has any."""
        fast: Values = {}
        outcomes: list[Meaning | None] = []
        for turn in tuple(self._turns):
            if turn.due(self._round) and self._wanted(turn):
                outcomes.append(self._run(turn, handle, fast))
        self._round += 1
        if len(outcomes) > 1 and None not in outcomes:
            refused = Meaning.NO_PERMISSION in outcomes
            raise DeviceGone(reason_of(Meaning.NO_PERMISSION if refused else Meaning.UNKNOWN))
        self._report_denied()
        return self._standing | fast

    def has(self, name: str) -> bool:
        """Return whether a reader of this name is left."""
        return any(turn.reader.name == name for turn in self._turns)

    def _rounds(self, period_s: float) -> int:
        return rounds_of(period_s, self._interval_s)

    def _wanted(self, turn: _Turn) -> bool:
        """Return whether a substitute for a field is needed."""
        number = turn.reader.instead_of
        if not number:
            return True
        supported = self._supports(number)
        if supported:
            self._drop(turn)
        return supported is False

    def _run(self, turn: _Turn, handle: Any, fast: Values) -> Meaning | None:
        """Store the values of a reader, or return why there are none."""
        reader = turn.reader
        begun = self._monotonic()
        try:
            values = reader.read(handle)
        except pynvml.NVMLError as error:
            self._costs.add(reader.name, reader.calls, self._monotonic() - begun)
            return self._failed(turn, error)
        cost_s = self._monotonic() - begun
        self._costs.add(reader.name, reader.calls, cost_s)
        for code in reader.refusals:
            self._costs.add_error(reader.name, code)
            if meaning_of(code) is Meaning.NO_PERMISSION:
                self._refused.add(f"some of {reader.name}")
        # First: what was read belongs to the tier of the next rounds.
        self._weigh(turn, cost_s)
        every_round = turn.rounds == 1
        if every_round:
            fast.update(values)
        self._stand(turn, {} if every_round else values)
        return None

    def _stand(self, turn: _Turn, values: Values) -> None:
        for key in turn.values:
            self._standing.pop(key, None)
        turn.values = values
        self._standing.update(values)

    def _failed(self, turn: _Turn, error: pynvml.NVMLError) -> Meaning:
        """Drop a reader that will never work; any other is repeated."""
        self._costs.add_error(turn.reader.name, code_of(error))
        meaning = classify(error)
        self._stand(turn, {})
        if meaning is Meaning.NO_PERMISSION:
            self._refused.add(turn.reader.name)
        if meaning in (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION):
            self._drop(turn)
        elif turn.rounds == 0:
            turn.rounds = self._rounds(RARE_S)
        return meaning

    def _drop(self, turn: _Turn) -> None:
        self._turns.remove(turn)

    def _report_denied(self) -> None:
        """Log a denied reader once, but not if the whole device is denied."""
        new = self._refused - self._denied
        if new:
            self._denied |= new
            logger.warning("not permitted, so not read: %s", ", ".join(sorted(new)))

    def _weigh(self, turn: _Turn, cost_s: float) -> None:
        """Move a reader to the slow tier if its readings are expensive, or back."""
        slow_rounds = self._rounds(SLOW_S)
        if turn.reader.period_s or slow_rounds == 1:
            return
        turn.costs_s = [*turn.costs_s[1 - _JUDGED_READINGS :], cost_s]
        if len(turn.costs_s) < _JUDGED_READINGS:
            return
        demoted = turn.rounds != 1
        if (cost_s > DEAR_S) == demoted:
            return
        median_s = statistics.median(turn.costs_s)
        if (median_s > DEAR_S) == demoted:
            return
        turn.rounds = 1 if demoted else slow_rounds
        turn.costs_s = []
        logger.warning(
            "reading %s takes %.1f ms: it is read in every %s. round from now on",
            *(turn.reader.name, median_s * 1e3, turn.rounds),
        )
