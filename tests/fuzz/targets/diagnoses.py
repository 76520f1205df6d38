"""Traces that are whole but odd, read to the end: measures, verdict, reports."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

from tests.diagnosis.trace.odd_traces import ARGUMENTS, CATEGORIES, NAMES, verdict
from tests.diagnosis.traces import ORIGIN_US, TraceFile, cpu_rank, rank_trace
from tests.fuzz.choices import ODD_VALUES, Choices
from tests.fuzz.watch import Target

FIELDS = ("ph", "cat", "name", "ts", "dur", "pid", "tid", "args")
MAX_CHANGES = 24


class Diagnoses:
    def __init__(self, folder: Path) -> None:
        self._path = folder / "rank0.json"
        small = TraceFile(warpwatch={"gc_pauses_us": [[1, 1]]}, baseTimeNanoseconds=0)
        for begin in small.each_step():
            small.operator(begin, 3000)
            small.kernel(begin + 4000, 5000, launched_us=begin + 3990)
        self._originals = [small, cpu_rank(0, loading_us=900), rank_trace(0), TraceFile(steps=0)]

    def run(self, data: bytes) -> None:
        choices = Choices(data)
        original = choices.of(self._originals)
        events = copy.deepcopy(original.events)
        for _ in range(MAX_CHANGES):
            if not choices:
                break
            if choices.number(2) or not events:
                events.append(_event(choices))
            else:
                _change(choices.of(events), choices)
        if choices.number(4) == 1:
            events += events
            random.Random(choices.number(256)).shuffle(events)
        head = dict(original.head)
        if choices.number(4) == 1:
            head[choices.of(("warpwatch", "distributedInfo", "deviceProperties"))] = choices.value(
                ("rank", "world_size", "gc_pauses_us", "name", "id", "job")
            )
        self._path.write_text(json.dumps({**head, "traceEvents": events}))
        verdict(self._path)


def _event(choices: Choices) -> dict[str, Any]:
    return {
        "ph": choices.of("XXXiB"),
        "cat": choices.of(CATEGORIES),
        "name": choices.of(NAMES),
        "ts": ORIGIN_US + choices.number(1 << 16),
        "dur": choices.number(1 << 14),
        "pid": choices.number(3),
        "tid": choices.number(3),
        "args": {choices.of(ARGUMENTS): _argument(choices) for _ in range(choices.number(4))},
    }


def _change(event: dict[str, Any], choices: Choices) -> None:
    field = choices.of(FIELDS)
    if field == "args" and isinstance(event.get("args"), dict):
        event["args"][choices.of(ARGUMENTS)] = _argument(choices)
    else:
        event[field] = choices.value(NAMES)


def _argument(choices: Choices) -> Any:
    kind = choices.number(4)
    if kind == 0:
        return choices.of(ODD_VALUES)
    if kind == 1:
        return [[choices.number(10) for _ in range(choices.number(5))] for _ in range(3)]
    return choices.number(1 << 16) if kind == 2 else choices.value(ARGUMENTS)


def target(folder: Path) -> Target:
    seeds = [bytes([first]) + bytes(range(first * 7, first * 7 + 90)) for first in range(8)]
    return Target(Diagnoses(folder).run, seeds, max_bytes=400)
