"""Users who attack a node through its files, until they are killed:

`python -m tests.loop.attackers UID KIND RENDEZVOUS INBOX`. KIND is a method of Attacker.
"""

import contextlib
import fcntl
import itertools
import json
import mmap
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.daemon.ranks.ring_files import RingFile, whole_ring
from tests.diagnosis.traces import write_hostile
from tests.loop.node import LoopNode
from warpwatch import protocol

VICTIM, OWN_JOB = "honest", "hostile"
IN_2099 = 4.07e9
FILES, RENAMED = 5_000, 100
TOKEN = "0123456789abcdef"
SUFFIXES = (".stacks.json", ".pt.trace.json.gz", ".memory.pickle", ".memory.json")


class HeldRing(RingFile):
    """A ring whose lock this process holds; opening the file again would release the lock."""

    def __init__(self, made: Path, ranks: Path, **metadata: Any) -> None:
        self._map: mmap.mmap | None = None
        super().__init__(made, **metadata)
        self._fd = os.open(self.path, os.O_RDWR)
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, 0)
        self._map = mmap.mmap(self._fd, protocol.RING_SIZE)
        # Only now: without a process it would be that of a dead one.
        self.path = self.path.rename(ranks / self.path.name)

    def put(self, offset: int, data: bytes) -> None:
        if self._map is None:
            super().put(offset, data)
        else:
            self._map[offset : offset + len(data)] = data

    def end(self) -> None:
        self.word(protocol.WORD_ENDED, 1)
        self._map.close()
        os.close(self._fd)


class Attacker:
    def __init__(self, rendezvous: Path, inbox: Path, made: Path) -> None:
        self.ranks = rendezvous / "ranks"
        self.commands = rendezvous / "commands"
        self.inbox = inbox
        self.made = made

    def ring(self, **metadata: Any) -> HeldRing:
        return HeldRing(self.made, self.ranks, **metadata)

    def claims(self) -> None:
        """To be of the victim's job: the same rank, a free one, an invalid one, step 2^63."""
        while not (rings := list(self.ranks.glob(f"{VICTIM}-*.ring"))):
            time.sleep(0.1)
        header = protocol.decode_header(rings[0].read_bytes(), protocol.RING_SIZE)
        victim = json.loads(header.metadata_text or b"{}")
        claimed = [{"rank": 3}, {"rank": 12, "world_size": 16}, {"rank": 777, "world_size": 1000}]
        mine = [self.ring(**victim | claim) for claim in claimed]
        self.ring(**victim | {"rank": 777})
        mine[2].steps = 1 << 60
        while True:
            for ring in mine:
                ring.heartbeat()
                ring.step()
            mine[2].word(protocol.WORD_STEP_BEGUN, 1 << 63)
            time.sleep(0.1)

    def restarts(self) -> None:
        """Ranks of a job that has other phases in each of its processes."""
        for turn in itertools.count():
            phases = [f"p{turn}-{number}" for number in range(protocol.MAX_PHASES)]
            ring = self.ring(job="restless", rank=turn % 8, world_size=8, phases=phases)
            ring.step()
            time.sleep(0.2)
            ring.end()

    def records(self) -> None:
        """Rings full of valid steps, new ones faster than the daemon looks."""
        rings = [self.ring(job="full", rank=rank, world_size=4) for rank in range(4)]
        for turn in itertools.count():
            content = whole_ring(turn)
            for ring in rings:
                ring.put(protocol.HEADER_SIZE, content)
            self._raise_counts(rings, turn)

    def counts(self) -> None:
        """Only the number of records, raised by a ring's size each time."""
        rings = [self.ring(job="empty", rank=rank, world_size=60) for rank in range(60)]
        for turn in itertools.count():
            self._raise_counts(rings, turn)

    def _raise_counts(self, rings: list[HeldRing], turn: int) -> None:
        for ring in rings:
            ring.heartbeat()
            ring.word(protocol.WORD_RECORDS, (turn + 1) * protocol.RECORD_COUNT)
        time.sleep(0.2)

    def fill(self) -> None:
        """The inbox is full of files of 2099, and of all names that can be foretold."""
        for turn in itertools.count():
            for number in range(FILES):
                path = self.inbox / f"{turn % 2}-{number}.pt.trace.json.gz"
                path.touch()
                os.utime(path, (IN_2099, IN_2099))
                if number % 100 == 0:
                    self._take_all_names()
                    time.sleep(0.1)

    def _take_all_names(self) -> None:
        for path in self.commands.glob("*.cmd"):
            with contextlib.suppress(OSError):
                _, asked = protocol.decode_command(path.read_bytes())
                if asked:
                    take_names(self.inbox, asked["id"], path.stem)

    def rename(self) -> None:
        """Files in both folders have other names at each look."""
        paths = [
            folder / f"junk-{number}"
            for folder in (self.ranks, self.inbox)
            for number in range(RENAMED)
        ]
        for path in paths:
            path.touch()
        while True:
            for index, path in enumerate(paths):
                name = f"junk-r{index}-{secrets.token_hex(8)}.ring"
                with contextlib.suppress(FileNotFoundError):
                    paths[index] = path.rename(path.with_name(name))
            time.sleep(0.1)

    def hand_over(self) -> None:
        """A job of one's own, and for each capture of it a small trace that is hard to read."""
        trace = write_hostile(self.made / "trace").read_bytes()
        ring = self.ring(job=OWN_JOB, world_size=1)
        done = ""
        while True:
            ring.heartbeat()
            ring.step()
            asked = self._asked(ring)
            if asked and asked["op"] == "capture" and asked["id"] != done:
                done = asked["id"]
                name = f"{done}.{ring.path.stem}.{TOKEN}.pt.trace.json.gz"
                (self.inbox / name).write_bytes(trace)
                first, last = asked["start_step"], asked["start_step"] + asked["steps"] - 1
                said = {"id": done, "first_step": first, "last_step": last, "token": TOKEN}
                ring.event("capture_finished", **said)
            time.sleep(0.1)

    def _asked(self, ring: RingFile) -> dict[str, Any]:
        with contextlib.suppress(OSError, protocol.ProtocolError):
            path = self.commands / f"{ring.path.stem}.cmd"
            return protocol.decode_command(path.read_bytes())[1]
        return {}


def take_names(inbox: Path, identifier: str, ring: str) -> None:
    """Take the names of a capture's files: folders block a rename, files block a creation."""
    base = inbox / f"{identifier}.{ring}"
    for suffix in SUFFIXES:
        for name in (f"{base}{suffix}.tmp", f"{base}.tmp{suffix}", f"{base}{suffix}"):
            Path(name).mkdir(exist_ok=True)
    Path(f"{base}.tmp").touch()


@contextlib.contextmanager
def attack(node: LoopNode, uid: int, *kinds: str) -> Iterator[None]:
    places = [str(node.run_dir), str(node.folder / "inbox")]
    processes = [
        node.start(kind, ["-m", "tests.loop.attackers", str(uid), kind, *places], {})
        for kind in kinds
    ]
    try:
        yield
        statuses = [process.poll() for process in processes]
        assert statuses == [None] * len(kinds), [*map(node.log, kinds)]
    finally:
        for process in processes:
            process.kill()


def main(uid: int, kind: str, rendezvous: Path, inbox: Path) -> None:
    made = rendezvous.parent / f"made-by-{kind}"
    made.mkdir()
    os.chown(made, uid, uid)
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    getattr(Attacker(rendezvous, inbox, made), kind)()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4]))
