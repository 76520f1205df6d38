"""Many steps settled at once come to what each of them does by itself."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.client.daemon_side import Ring
from warpwatch import protocol
from warpwatch.columns import spent_in_laps
from warpwatch.phase_times import (
    END,
    FIRST_PHASE,
    LAST,
    LEAVE,
    OTHER,
    START,
    SWITCH,
    Accounts,
    Entry,
)
from warpwatch.ring import RingWriter

PHASES = 4
# Of a step that comes again and again; the last entry ends it, with how many samples is drawn.
FIRST, SECOND, THIRD, FOURTH = range(FIRST_PHASE, FIRST_PHASE + PHASES)
STEADY = (
    [(FIRST, None), (LEAVE, None), (SECOND, None), (LEAVE, None), (END, None)],
    [(FIRST, None), (SECOND, None), (LEAVE, None), (SECOND, None), (LEAVE, None), (END, None)],
    [(FIRST, None), (LEAVE, THIRD), (SECOND, OTHER), (LEAVE, None), (FOURTH, None), (LAST, None)],
    [(SWITCH, FOURTH), (FIRST, None), (LEAVE, None), (END, None)],
    [(END, None)],
)
# What happens between them now and then.
ODD = (
    [(START, None)],
    [(THIRD, None)],
    [(LEAVE, None)],
    [(SWITCH, SECOND)],
    [(FIRST, THIRD), (LEAVE, FOURTH), (END, None)],
    [(END, None), (START, None), (FIRST, None)],
)


class EachByItself(Accounts):
    """Settles no steps together, however alike."""

    __slots__ = ()

    def _settle_alike(self, length: int) -> int:
        return 0


class Pair:
    """The same log, settled both ways, each into a ring of its own."""

    def __init__(self, folder: Path) -> None:
        self.accounts = [Accounts(), EachByItself()]
        self.paths = [folder / "together.ring", folder / "each.ring"]
        for accounts, path in zip(self.accounts, self.paths, strict=True):
            path.write_bytes(bytes(protocol.RING_SIZE))
            ring = RingWriter(os.open(path, os.O_RDWR), path.stem)
            ring.write_identity(
                protocol.Identity(os.getpid(), bytes(16), 0, 0, 0, protocol.RECORD_COUNT)
            )
            accounts.phase_names = [f"phase{number}" for number in range(PHASES)]
            accounts.ring = ring
            accounts.wall_offset_ns = 1_000_000

    def push(self, entry: Entry) -> None:
        for accounts in self.accounts:
            accounts.log.extend(entry)

    def agree(self) -> None:
        together, each = self.accounts
        assert together.totals == each.totals
        assert together.spent == each.spent
        assert together.current == each.current
        assert together.log == each.log == []
        # The records that name a phase hold the time of their writing.
        rings = [Ring(path) for path in self.paths]
        assert rings[0].torn == rings[1].torn == 0
        steps = [
            [one for one in ring.records if one.type == protocol.RECORD_STEP] for ring in rings
        ]
        assert steps[0] == steps[1]
        told = [ring.header.totals for ring in rings]
        assert (told[0].steps, told[0].phases_ns) == (told[1].steps, told[1].phases_ns)

    def close(self) -> None:
        for accounts in self.accounts:
            assert accounts.ring is not None
            accounts.ring.close()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    found = Pair(tmp_path)
    yield found
    found.close()


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_are_alike_come_to_the_same_together_and_each_by_itself(
    pair: Pair, seed: int
) -> None:
    draw = random.Random(seed)
    now = 0
    for _ in range(30):
        steady = draw.choice(STEADY)
        entries = [entry for _ in range(draw.randrange(1, 300)) for entry in steady]
        if draw.random() < 0.5:
            entries += draw.choice(ODD)
        if draw.random() < 0.3:
            # Settled in the midst of a step.
            entries = entries[: draw.randrange(len(entries)) + 1]
        for what, detail in entries:
            now += draw.randrange(1, 1000)
            ends = what in (END, LAST)
            pair.push((what, now, (0, draw.randrange(64), 7) if ends else detail))
        pair.agree()
    assert pair.accounts[0].totals[0] > 1000


def test_steps_go_on_at_the_begin_of_the_ring(pair: Pair) -> None:
    steps = protocol.RECORD_COUNT + 100
    for number in range(steps):
        pair.push((END, 10 * (number + 1), (0, 1, 0)))
    pair.agree()
    ring = Ring(pair.paths[0])
    numbers = [step[0] for step in ring.steps]
    assert ring.header.records == steps + PHASES
    assert numbers == list(range(steps - len(numbers), steps))
    assert len(numbers) > protocol.RECORD_COUNT - PHASES - 2


def test_laps_spend_their_time_in_the_phases_they_are_run_in() -> None:
    laps = [100, 103, 32, 0, 110, 130, 131, 150, 151, 152, 16, 9, 160, 190, 195, 200]
    spent = spent_in_laps(laps, (FOURTH, FIRST, SECOND, THIRD), 90, FIRST_PHASE + PHASES)
    assert [list(column) for column in spent] == [
        [1, 1],
        [1, 1],
        [32, 16],
        [0, 9],
        [60, 50],
        [7, 8],
        [20, 30],
        [19, 5],
        [3, 1],
    ]
