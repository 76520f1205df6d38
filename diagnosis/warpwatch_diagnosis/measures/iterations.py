"""Finds the iterations of an inference server, by the marks that servers and captures make.

A capture of Warpwatch notes the work of its steps in the trace's head. Other traces have marks:
vLLM marks the forward pass of a rank (``execute_context_1(512)_generation_7(7)``, also with more
details), SGLang its batches (``step[DECODE bs=32]``), a program of its own whole iterations
(``iteration[mixed prefill_tokens=512 decode_requests=7 preempted=1]``).

A gap between two marks is a wait for work if no request was in flight: the next batch that decodes
has only requests whose prompts came after the gap. Any other gap is time of the scheduler.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import mean, median

from warpwatch_diagnosis.intervals import Interval, Intervals
from warpwatch_diagnosis.trace.events import THREAD, TraceEvent, grouped, outermost
from warpwatch_diagnosis.trace.reader import Trace

_N = r"(\d{1,15})"
_VLLM = re.compile(rf"execute_(?:\d+_)?context_{_N}\((?:sq)?{_N}[^)]*\)_generation_{_N}\(")
_SGLANG = re.compile(rf"step\[(\w+) bs={_N}(?: toks={_N})?")
_OWN = re.compile(r"iteration\[(?:prefill|decode|mixed)((?: \w+=\d{1,15})*)\]")
_FIELD = re.compile(rf" (\w+)={_N}")
_PHASES = frozenset({"forward", "sample"})
# SGLang's modes that compute prompts. Its draft models only propose tokens for the next batch.
_PROMPTS = frozenset({"EXTEND", "MIXED", "SPLIT_PREFILL", "PREBUILT"})
_NO_WORK = frozenset({"IDLE", "DRAFT_EXTEND", "DRAFT_EXTEND_V2"})
# A launch takes µs. Work that starts later than this was behind other work (own value).
MAX_LAUNCH_US = 1_000.0
MAX_ITERATIONS_A_STEP = 2
# Iterations whose work differs by more are not compared (own value).
MAX_WORK_DIFFERENCE = 0.25
# A prompt that makes an iteration this many times as long is work of its own (own value).
MAX_UNEVENNESS = 1.5


@dataclass(frozen=True, slots=True)
class Iteration:
    """One pass of the engine by its mark, in µs.

    prefill_requests, prefill_tokens: the prompts, or parts of them, that it computes.
    decode_requests: those that get another token. preempted: those that lost their place before.
    in_flight: whether there were requests before it that decode, in it or after it.
    """

    begin_us: float
    end_us: float
    prefill_requests: int = 0
    prefill_tokens: int = 0
    decode_requests: int = 0
    preempted: int = 0
    in_flight: bool = False


@dataclass(frozen=True, slots=True)
class ServerTime:
    """The iterations of a server's rank, and the time between them with and without requests.

    spans: each iteration from the end of the one before, or after idle from its own begin.
    """

    iterations: tuple[Iteration, ...]
    spans: tuple[Interval, ...]
    scheduling: Intervals
    waiting: Intervals


NO_SERVER = ServerTime((), (), [], [])


def server_time(trace: Trace) -> tuple[ServerTime | None, list[TraceEvent]]:
    """Return the iterations, and one event for each span; None and no event if it has no marks."""
    marks = _captured(trace) or _outermost(trace)
    steps = {e.name for e in trace.events["annotation"] if e.name.startswith("ProfilerStep")}
    # A training that generates text in its steps has many iterations in each.
    if not marks or (steps and len(marks) > MAX_ITERATIONS_A_STEP * len(steps)):
        return None, []
    found = [iteration for _, iteration in marks]
    found = [replace(i, in_flight=_in_flight(found, number)) for number, i in enumerate(found)]
    scheduling: Intervals = []
    waiting: Intervals = []
    begin_us = _available_us(trace, marks[0][0])
    spans = [(begin_us, found[0].end_us)]
    for before, after in pairwise(found):
        gap = before.end_us, after.begin_us
        if gap[0] < gap[1]:
            (scheduling if after.in_flight else waiting).append(gap)
        spans.append((gap[0] if after.in_flight else gap[1], after.end_us))
    spans[-1] = spans[-1][0], max(spans[-1][1], _last_work_us(trace, marks[-1][0]))
    thread = marks[0][0].thread
    events = [
        TraceEvent(f"iteration#{number}", begin, end, thread, None)
        for number, (begin, end) in enumerate(spans)
    ]
    return ServerTime(tuple(found), tuple(spans), scheduling, waiting), events


def parse(name: str) -> tuple[int, int, int, int] | None:
    """Return the work in a mark's name, in the order of Iteration; None for no work or mark."""
    work = 0, 0, 0, 0
    if match := _VLLM.match(name):
        work = int(match[1]), int(match[2]), int(match[3]), 0
    elif match := _SGLANG.match(name):
        mode, size = match[1], int(match[2])
        if mode not in _NO_WORK:
            work = (size, int(match[3] or 0), 0, 0) if mode in _PROMPTS else (0, 0, size, 0)
    elif match := _OWN.match(name):
        known = {key: int(value) for key, value in _FIELD.findall(match[1])}
        tokens = known.get("prefill_tokens", 0)
        requests = known.get("prefill_requests", tokens)
        work = requests, tokens, known.get("decode_requests", 0), known.get("preempted", 0)
    return work if any(work) else None


def _captured(trace: Trace) -> list[tuple[TraceEvent, Iteration]]:
    """Return the steps of a server's capture, each from its first to its last own event.

    These are operators and the phases of a worker. The number of prompts is unknown: at most one
    for each token.
    """
    steps = {e.name: e for e in trace.events["annotation"] if e.name.startswith("ProfilerStep#")}
    ordered = sorted(steps.values(), key=lambda e: e.begin_us)
    if not ordered or len(ordered) != len(trace.works):
        return []
    own = [e for e in trace.events["annotation"] if e.name in _PHASES] + trace.events["operator"]
    events = sorted((e for e in own if e.thread == ordered[0].thread), key=lambda e: e.begin_us)
    begins = [e.begin_us for e in events]
    found = []
    for step, (tokens, requests) in zip(ordered, trace.works, strict=True):
        mine = events[bisect_left(begins, step.begin_us) : bisect_left(begins, step.end_us)]
        low = mine[0].begin_us if mine else step.begin_us
        high = max((e.end_us for e in mine), default=step.end_us)
        mark = step._replace(begin_us=low, end_us=min(high, step.end_us))
        iteration = Iteration(mark.begin_us, mark.end_us, tokens, tokens, requests)
        found.append((mark, iteration))
    return found


def _outermost(trace: Trace) -> list[tuple[TraceEvent, Iteration]]:
    """Return the marks of the thread with most of them by begin, without marks inside of others."""
    names = {event.name for event in trace.events["annotation"]}
    known = {name: work for name in names if (work := parse(name)) is not None}
    threads = grouped((e for e in trace.events["annotation"] if e.name in known), THREAD)
    if not threads:
        return []
    marks = max(sorted(threads.items()), key=lambda item: len(item[1]))[1]
    return [(e, Iteration(e.begin_us, e.end_us, *known[e.name])) for e in outermost(marks)]


def _in_flight(found: Sequence[Iteration], number: int) -> bool:
    """Return whether requests were in flight before an iteration: the next to decode has them."""
    prompts = 0
    for iteration in found[number:]:
        if iteration.decode_requests:
            return iteration.decode_requests > prompts
        prompts += iteration.prefill_requests
    return False


def _launched(trace: Trace, mark: TraceEvent) -> list[tuple[TraceEvent, TraceEvent]]:
    """Return the work that the mark's thread launched in it, each with its call."""
    calls = {
        call.correlation: call
        for call in trace.events["runtime"]
        if call.thread == mark.thread and mark.begin_us <= call.begin_us < mark.end_us
    }
    calls.pop(None, None)
    work = trace.events["kernel"] + trace.events["copy"]
    return [(event, calls[event.correlation]) for event in work if event.correlation in calls]


def _available_us(trace: Trace, mark: TraceEvent) -> float:
    """Return the begin of the first iteration, later if its device still did unrecorded work."""
    launched = _launched(trace, mark)
    if not launched:
        return mark.begin_us
    first, call = min(launched, key=lambda pair: (pair[0].begin_us, pair[0].end_us))
    queued = first.begin_us - call.end_us > MAX_LAUNCH_US
    recorded = any(e.begin_us < first.begin_us for e in trace.events["kernel"])
    return first.begin_us if queued and not recorded else mark.begin_us


def _last_work_us(trace: Trace, mark: TraceEvent) -> float:
    return max((event.end_us for event, _ in _launched(trace, mark)), default=mark.end_us)


def is_like(now: ServerTime | None, before: ServerTime | None) -> bool:
    """Return whether the iterations of two traces had about the same work.

    It is compared on average, or by the median if no iteration of either is much longer: then a few
    more short prompts make no difference.
    """
    if now is None or before is None:
        return now is before
    return _is_same_work(now, before, mean) or (
        _is_even(now) and _is_even(before) and _is_same_work(now, before, median)
    )


def _is_same_work(
    now: ServerTime, before: ServerTime, middle: Callable[[Sequence[int]], float]
) -> bool:
    for name in ("prefill_tokens", "decode_requests"):
        mine, usual = (middle([getattr(i, name) for i in s.iterations]) for s in (now, before))
        if abs(mine - usual) > MAX_WORK_DIFFERENCE * max(mine, usual):
            return False
    return True


def _is_even(server: ServerTime) -> bool:
    spans = [end - begin for begin, end in server.spans]
    return max(spans) <= MAX_UNEVENNESS * median(spans)
