"""Finds the faults of an inference server, and the time in which it had nothing to do."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from warpwatch_diagnosis.measures.intervals import Intervals, intersection, longest_us, total
from warpwatch_diagnosis.measures.iterations import ServerTime
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import (
    Capture,
    Confidence,
    Finding,
    RankRule,
    idle,
    milliseconds,
    percent,
    times,
    worst_gaps,
)
from warpwatch_diagnosis.rules.host_bound import HIGH_SHARE, MIN_SHARE

# Iterations that only decode give the usual time (own value).
MIN_DECODING = 2
# Users notice prompts that delay others by this many usual iterations (own value).
MIN_STALL_RATIO = 5.0
# Preemptions in more iterations than one, and in at least this share of them, are not an accident.
MIN_PREEMPTING = 2
MIN_PREEMPTING_SHARE = 0.05


class SchedulerBoundRule(RankRule):
    """Finds time between iterations while requests are in flight: the scheduler is late."""

    kind = "scheduler_bound"
    min_share = MIN_SHARE
    high_share = HIGH_SHARE

    def lost(self, measures: Measures) -> Intervals:
        if measures.gpu is not None:
            return idle(measures, "scheduler")
        return measures.cpu.scheduler if measures.cpu else []

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        what = "the GPU is idle" if measures.gpu else "the worker does nothing"
        yield (
            f"{what} for {percent(measures.share(lost))} of the time between two iterations, "
            "although requests are in flight"
        )
        if measures.server is not None:
            gaps = [end - begin for begin, end in measures.server.scheduling]
            spent = [i.end_us - i.begin_us for i in measures.server.iterations]
            yield (
                f"the scheduler ran {times(len(gaps))} between iterations, "
                f"{milliseconds(median(gaps))} each in the median and {milliseconds(max(gaps))} at "
                f"most; a forward pass takes {milliseconds(median(spent))}"
            )
        yield from worst_gaps(measures, "scheduler")


class WaitingForWorkRule(RankRule):
    """Finds the time without a request in flight, which is not a fault and cannot be won back."""

    kind = "waiting_for_work"
    min_share = MIN_SHARE
    high_share = HIGH_SHARE

    def lost(self, measures: Measures) -> Intervals:
        waiting = measures.server.waiting if measures.server else []
        return intersection(waiting, measures.gpu.idle) if measures.gpu else waiting

    def recoverable_us(self, measures: Measures, lost: Intervals) -> float:
        return 0.0

    def confidence(self, measures: Measures, lost: Intervals, recoverable_us: float) -> Confidence:
        return "high" if self.is_sure(measures, lost) else "medium"

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        yield (
            f"no request was in flight for {percent(measures.share(lost))} of the time: the server "
            "waited for work"
        )
        yield f"it waited {times(len(lost))}, {milliseconds(longest_us(lost))} at most"


class PrefillInterferenceRule(RankRule):
    """Finds prompts whose computing makes requests that decode wait for their next token.

    The prompts have to be computed, so no time can be won back: only the wait becomes shorter.
    """

    kind = "prefill_interference"
    min_share = 0.25
    high_share = 0.50

    def lost(self, measures: Measures) -> Intervals:
        server = measures.server
        usual_us = _usual_us(server) if server else None
        if server is None or usual_us is None:
            return []
        return [(begin + usual_us, end) for begin, end in _stalls(server) if end - begin > usual_us]

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        usual_us = _usual_us(measures.server) if measures.server else None
        if measures.server is None or not usual_us:
            return False
        stalls = [end - begin for begin, end in _stalls(measures.server)]
        long = median(stalls) >= MIN_STALL_RATIO * usual_us
        return long and super().applies(measures, lost, several)

    def recoverable_us(self, measures: Measures, lost: Intervals) -> float:
        return 0.0

    def confidence(self, measures: Measures, lost: Intervals, recoverable_us: float) -> Confidence:
        return "high" if self.is_sure(measures, lost) else "medium"

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        server = measures.server
        if server is None:
            return
        stalls = [end - begin for begin, end in _stalls(server)]
        yield (
            f"requests that decode wait for the prompts of others {percent(measures.share(lost))} "
            "of the time"
        )
        yield (
            f"an iteration with prompts takes {milliseconds(median(stalls))}, "
            f"{milliseconds(max(stalls))} at most, one that only decodes "
            f"{milliseconds(_usual_us(server) or 0.0)}"
        )
        tokens = [i.prefill_tokens for i in server.iterations if i.prefill_tokens]
        if tokens:
            yield f"they compute up to {max(tokens):,} tokens of prompts at once"


def _usual_us(server: ServerTime) -> float | None:
    """Return the median time of iterations that only decode, or None if there are too few."""
    spans = zip(server.iterations, server.spans, strict=True)
    found = [end - begin for i, (begin, end) in spans if not i.prefill_requests]
    return median(found) if len(found) >= MIN_DECODING else None


def _stalls(server: ServerTime) -> Intervals:
    """Return the iterations that compute prompts while requests that decode are in flight."""
    found = zip(server.iterations, server.spans, strict=True)
    return [span for i, span in found if i.prefill_requests and i.in_flight]


class KvThrashRule(RankRule):
    """Finds requests that lose their place in the KV cache, whose tokens are computed again."""

    kind = "kv_thrash"
    high_share = 0.05

    def lost(self, measures: Measures) -> Intervals:
        """Return the iterations that compute prompts, as many as requests were preempted."""
        server = measures.server
        preempted = sum(i.preempted for i in server.iterations) if server else 0
        return self._recomputing(measures, preempted) if preempted else []

    def _recomputing(self, measures: Measures, preempted: int) -> Intervals:
        server = measures.server
        if server is None:
            return []
        found = list(zip(server.iterations, server.spans, strict=True))
        prompts = [(begin, end) for i, (begin, end) in found if i.prefill_requests]
        return prompts[-preempted:] or [span for i, span in found if i.preempted]

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        iterations = measures.server.iterations if measures.server else ()
        preempting = sum(i.preempted > 0 for i in iterations)
        return preempting >= max(MIN_PREEMPTING, MIN_PREEMPTING_SHARE * len(iterations))

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        iterations = measures.server.iterations if measures.server else ()
        preempted = sum(i.preempted for i in iterations)
        yield (
            f"{preempted:,} requests lost their place in the KV cache in {len(iterations):,} "
            "iterations; what they had is computed again"
        )
        yield (
            f"iterations that compute prompts again take {milliseconds(total(lost))}, "
            f"{percent(measures.share(lost))} of the time"
        )

    def of_asked(self, capture: Capture) -> list[Finding]:
        """Return the finding of a capture whose anomaly counted the preemptions.

        They are rarer than the few iterations of a capture, and not every mark has them.
        """
        found = []
        for measures in (m for m in capture if m.server):
            lost = self._recomputing(measures, len(measures.steps))
            evidence = "requests lose their place in the KV cache and are computed again"
            share, us = self.share(measures, lost), self.recoverable_us(measures, lost)
            more = () if lost else ("the captured iterations only decode",)
            advised = self.advice(measures)
            found += [self.finding(measures, share, us, "medium", (evidence, *more), advised)]
        return found
