"""Synthetic telemetry: what the detector tests feed, in event time from a fixed epoch."""

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

import msgspec

from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.anomalies.register import Change
from warpwatch_detection.config import AnomaliesConfig, DetectionConfig
from warpwatch_detection.detector import JobStep
from warpwatch_detection.detectors import DETECTORS
from warpwatch_detection.engine import Detection
from warpwatch_detection.job_steps import JobSteps
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.log import Decoder
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Record, Step

EPOCH_S = 1_700_000_000.0

# (step, rank) -> seconds of that rank's own compute or data wait on top of the healthy ones.
Extra = Callable[[int, int], float]


def nothing(step: int, rank: int) -> float:
    return 0.0


def on(ranks: int | tuple[int, ...] | None, extra_s: float, every: int = 1, at: int = 0) -> Extra:
    """``extra_s`` on these ranks (None: on all), in every so many steps."""
    chosen = (ranks,) if isinstance(ranks, int) else ranks

    def extra(step: int, rank: int) -> float:
        return extra_s if (chosen is None or rank in chosen) and step % every == at else 0.0

    return extra


class Job:
    """A synchronous data-parallel job: the slowest rank sets the pace, the others wait in comm."""

    def __init__(
        self,
        ranks: int = 2,
        step_s: float = 0.04,
        noise: float = 0.2,
        comm_noise: float = 0.0,
        *,
        seed: int = 1,
    ):
        self.ranks = ranks
        self.step_s = step_s
        self.noise, self.comm_noise = noise, comm_noise
        self.time = EPOCH_S
        self.step = 0
        self._random = random.Random(seed)

    def seen(self) -> Iterator[Record]:
        for rank in range(self.ranks):
            yield RankSeen(self.time, "llama", rank, self.ranks, f"GPU-{rank}")

    def steps(
        self,
        count: int,
        compute: Extra = nothing,
        wait: Extra = nothing,
        pause: Extra = nothing,
        comm: Extra = nothing,
        tokens: Extra = nothing,
    ) -> Iterator[Step]:
        """Yield steps.

        All ranks spend ``pause`` in no declared phase, as an undeclared checkpoint does, and
        ``comm`` in communication. ``tokens`` is a number of them and no time.
        """
        for _ in range(count):
            works, waits = [], []
            for rank in range(self.ranks):
                noisy = self._random.lognormvariate(0.0, self.noise)
                works.append(0.8 * self.step_s * noisy + compute(self.step, rank))
                waits.append(0.01 * self.step_s * noisy + wait(self.step, rank))
            paused, comm_s = pause(self.step, 0), 0.1 * self.step_s
            if self.comm_noise:
                comm_s *= self._random.lognormvariate(0.0, self.comm_noise)
            local = max(work + wait_s for work, wait_s in zip(works, waits, strict=True))
            duration = local + comm_s + comm(self.step, 0) + paused
            self.time += duration
            for rank in range(self.ranks):
                own_comm_s = duration - paused - works[rank] - waits[rank]
                phases = {"data_wait": waits[rank], "comm": own_comm_s}
                yield Step(
                    self.time, "llama", rank, self.step, duration, phases_s=phases,
                    tokens=int(tokens(self.step, rank)),
                )  # fmt: skip
            self.step += 1


def slow_rank(begin: int, steps: int) -> Iterator[Record]:
    """Rank 1 of two is slow for ``steps`` from ``begin`` on; then the job ends."""
    job = Job(ranks=2, step_s=0.5, noise=0.02)
    yield from (*job.seen(), *job.steps(begin), *job.steps(steps, compute=on(1, 0.2)))
    yield End(job.time, "llama")


def detection(hold_s: float = 600.0, **sections: Any) -> Detection:
    """The engine with the defaults and what ``sections`` (of ``detection``) change."""
    return Detection(DetectionConfig.model_validate(sections), AnomaliesConfig(hold_s=hold_s))


def alone(*kinds: str, **sections: Any) -> Detection:
    return detection(disabled=DETECTORS.keys() - set(kinds), **sections)


def fed(engine: Detection, records: Iterable[Record]) -> list[Anomaly]:
    return [change.anomaly for change in changes_of(engine, records)]


def opened(engine: Detection, records: Iterable[Record]) -> list[Anomaly]:
    changes = changes_of(engine, records)
    return [change.anomaly for change in changes if change.what in ("opened", "reopened")]


def changes_of(engine: Detection, records: Iterable[Record]) -> list[Change]:
    """Feed records; no detector raises."""
    changes = [change for record in records for change in engine.feed(record)]
    assert engine.pop_failure() is None
    return changes


def kinds_of(anomalies: Iterable[Anomaly]) -> list[tuple[str, int | None]]:
    return [(one.kind, one.rank) for one in anomalies]


EXTRA = re.compile(r"(compute|wait|pause|tell) (\S+) ([\d.]+)(?: every (\d+))?(?: at (\d+))?")


def lived(job: Job, engine: Detection, story: str, **others: Extra) -> list[Anomaly]:
    """Feed steps in parts as "300; 60 compute 3 0.06 -> straggler 3", and return what was opened.

    This feeds 300 steps, then 60 in which rank 3 computes 0.06 s longer, after which its straggler
    is active; one of the job has "job" for a rank. An extra is for some ranks ("1,6") or "all", and
    may be "every 30 at 5". Reports of pauses are "tell". ``others``: extras of every part.
    """
    opened(engine, job.seen())
    found: list[Anomaly] = []
    for part in story.split("; "):
        steps, _, active = part.partition(" -> ")
        kind, _, rank = active.partition(" ")
        expected = [(kind, None if rank == "job" else int(rank))] if active else []
        extras: dict[str, Extra] = {}
        for phase, ranks, seconds, every, at in EXTRA.findall(steps):
            chosen = None if ranks == "all" else tuple(map(int, ranks.split(",")))
            extras[phase] = on(chosen, float(seconds), int(every or 1), int(at or 0))
        count, tell = int(steps.split()[0]), extras.pop("tell", nothing)
        before = kinds_of(engine.active)
        # A restart of the daemon within the part changes nothing.
        new = opened(engine, with_events(job.steps(count // 3, **others | extras), tell))
        restart(engine)
        rest = job.steps(count - count // 3, **others | extras)
        new += opened(engine, with_events(rest, tell))
        assert kinds_of(new) == [one for one in expected if one not in before], part
        assert kinds_of(engine.active) == expected, part
        found += new
    return found


def made(rows: Sequence[dict[str, Any]]) -> Iterator[Record | str]:
    """Yield the records of rows as a log has them, of llama if no job is given.

    A row has ``times`` records, ``every`` second one, of each of ``ranks``; "5+2" is 5, then 7. A
    row with ``do`` yields its word, after so many seconds; one with ``again`` is so many times its
    ``rows``, in which numbers go on. This yields "row" after each.
    """
    now, decoder = EPOCH_S, Decoder()
    ends = [*accumulate(len(row.get("rows", "1")) * row.get("again", 1) for row in rows)]
    turns = ((row, turn) for row in rows for turn in range(row.get("again", 1)))
    flat = ((one, turn) for row, turn in turns for one in row.get("rows", [row]))
    for place, (row, turn) in enumerate(flat, 1):
        every, ranks = row.get("every", 1.0), row.get("ranks", [row.get("rank")])
        times = row.get("times", 1)
        for number in range(turn * times, (turn + 1) * times):
            now += every
            if "do" in row:
                yield f"{row['do']} {now}"
                continue
            for rank in ranks:
                fields = {"job": "llama", **grown(row, number, rank), "time": now, "rank": rank}
                for word in ("every", "ranks", "times"):
                    fields.pop(word, None)
                yield decoder.decode(fields)
        if place in ends:
            yield "row"


def grown(value: Any, number: int, rank: int | None) -> Any:
    """Return the value of a row's record ``number``, with the rank for {}, or that of the rank."""
    if isinstance(value, dict) and "else" in value:
        value = value.get(f"rank {rank}", value["else"])
    if isinstance(value, dict):
        return {key: grown(one, number, rank) for key, one in value.items()}
    if not isinstance(value, str):
        return value
    begin, plus, each = value.partition("+")
    return json.loads(begin) + number * json.loads(each) if plus else value.format(rank)


def joined(records: Iterable[Record]) -> list[JobStep]:
    steps = JobSteps()
    found = [steps.observe(record) for record in records]
    return [step for step in found if step is not None]


def restart(engine: Detection) -> None:
    """Save and restore the detectors' states as a restart of the daemon does."""
    for detector in engine.runner.detectors:
        saved = msgspec.msgpack.encode(detector.state)
        detector.state = msgspec.msgpack.decode(saved, type=detector.state_form)


def with_events(steps: Iterable[Step], tell: Extra) -> Iterator[Record]:
    """Yield steps, and the shim's reports of the pauses in them."""
    for step in steps:
        yield step
        if (duration_s := tell(step.step, step.rank)) > 0:
            detail = {"duration_s": duration_s, "generation": 2, "step": step.step}
            yield RankEvent(step.time, step.job, step.rank, "gc_pause", detail)


# Steps that the rendezvous reads again for every rank.
REWIND = 200


def restarted(engine: Detection, now: float, **sections: Any) -> tuple[Detection, list[Anomaly]]:
    """The next daemon's engine, and what the restart closed."""
    body = snapshot.save(engine.parts())
    fresh = detection(**sections)
    saved = msgspec.msgpack.decode(body, type=snapshot.Snapshot)
    kinds = snapshot.restore(saved, fresh.parts())
    return fresh, [change.anomaly for change in fresh.resume(now, kinds)]


def again(records: list[Record]) -> list[Record]:
    """Return the records that a new daemon reads again."""
    seen = [record for record in records if isinstance(record, RankSeen)]
    steps = [record for record in records if isinstance(record, Step)]
    return [*seen, *steps[-REWIND:]]


def lives(engine: Detection, records: Iterable[Record], every: int = 0) -> list[tuple[Any, ...]]:
    """Kind, id, rank, begin and end of every anomaly; a restart after each ``every`` records."""
    reported: dict[str, tuple[Any, ...]] = {}
    read: list[Record] = []
    for number, record in enumerate(records, 1):
        read.append(record)
        changes = fed(engine, [record])
        if every and number % every == 0:
            engine, closed = restarted(engine, read[-1].time)
            assert closed == []
            changes += fed(engine, again(read))
        for one in changes:
            reported[one.id] = (one.kind, one.id, one.rank, one.begin_step, one.end_time)
    return list(reported.values())
