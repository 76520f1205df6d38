"""A job that calls its phases differently in every process has few series for it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.ranks.sources import ranks_source
from warpwatch import protocol
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.saved import FILE, Positions
from warpwatch_daemon.ranks.source import RanksSource
from warpwatch_telemetry.records import Step

RANKS = 8
RESTARTS = 40


class Restarts:
    """Ranks that restart, each process with 16 phases of its own names."""

    def __init__(self, folder: RendezvousFolder, source: RanksSource) -> None:
        self.folder = folder
        self.source = source
        self.at = 0.0

    def poll(self) -> list[Step]:
        self.at += 1.0
        records = self.source.poll(1e10, self.at)
        return [record for record in records if isinstance(record, Step)]

    def restart(self, turn: int, same_names: bool) -> list[Step]:
        """A step of every rank, whose process is gone at once: 0.01 s in every phase."""
        for rank in range(RANKS):
            of = "all" if same_names else rank
            names = [f"p{of}_{turn}_{n}" for n in range(protocol.MAX_PHASES)]
            ring = RingFile(self.folder.ranks, rank=rank, world_size=RANKS, phases=names)
            ring.phases_ns = [10**7] * protocol.MAX_PHASES
            payload = protocol.STEP.pack(0, 10**9, protocol.ABSENT, protocol.ABSENT, 8, 0)
            payload += (10**7).to_bytes(8, "little") * protocol.MAX_PHASES
            ring.record(protocol.RECORD_STEP, payload)
            totals = protocol.encode_totals(1, 1, 1, 8, 0, 10**9, ring.phases_ns)
            ring.put(protocol.TOTALS_OFFSETS[1], totals)
        return self.poll()

    @property
    def phases_s(self) -> dict[int, dict[str, float]]:
        return {state.rank: dict(state.phases_s) for state in self.source.states(self.at)}


@pytest.fixture
def restarts(folder: RendezvousFolder, source: RanksSource) -> Restarts:
    return Restarts(folder, source)


def test_ranks_that_restart_with_new_phases_have_16_each_and_64_a_job(
    restarts: Restarts, tmp_path: Path
) -> None:
    for turn in range(RESTARTS):
        restarts.restart(turn, same_names=False)
    phases_s = restarts.phases_s
    positions = next(tmp_path.rglob(FILE))
    # The first four ranks have taken the job's 64, the others have one name for all of theirs.
    assert [len(phases_s[rank]) for rank in range(RANKS)] == [17] * 4 + [1] * 4
    assert positions.stat().st_size < 10_000
    for rank in range(RANKS):
        assert sum(phases_s[rank].values()) == pytest.approx(RESTARTS * 16 * 0.01)


def test_steps_say_other_for_the_phases_beyond_the_limit(restarts: Restarts) -> None:
    known = restarts.restart(0, same_names=True)
    assert len(known) == RANKS
    assert all(step.phases_s == {f"pall_0_{n}": 0.01 for n in range(16)} for step in known)
    beyond = restarts.restart(1, same_names=True)
    assert len(beyond) == RANKS
    assert all(step.phases_s == {"other": pytest.approx(0.16)} for step in beyond)


def test_names_of_before_a_restart_of_the_daemon_stay_and_those_of_now_are_other(
    folder: RendezvousFolder, restarts: Restarts
) -> None:
    restarts.restart(0, same_names=True)
    restarts.restart(1, same_names=True)
    before = restarts.phases_s
    restarts.source.close()
    restarts.source = ranks_source(folder, lambda reason: None)
    restarts.poll()
    assert restarts.phases_s == before
    assert set(before[0]) == {*(f"pall_0_{n}" for n in range(16)), "other"}


def test_positions_are_written_only_when_they_have_changed(tmp_path: Path) -> None:
    wakes: Counter[str] = Counter()
    positions = Positions(tmp_path, wake=lambda: wakes.update(["wake"]))
    entry = {"pod": None, "ring": "a", "left": True}
    assert positions.put((), [entry]) == 1
    positions.write()
    written = (tmp_path / FILE).stat()
    assert positions.put((), [entry]) == 1
    positions.write()
    assert (tmp_path / FILE).stat().st_mtime_ns == written.st_mtime_ns
    assert wakes["wake"] == 1
    assert positions.put((), []) == 2
    positions.write()
    assert positions.written == 2
