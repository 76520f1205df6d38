"""Finds the faults of an inference server, and the time in which it had nothing to do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from statistics import median

from warpwatch_diagnosis.intervals import Interval, Intervals, intersection, longest_us, total
from warpwatch_diagnosis.measures.iterations import NO_SERVER, Iteration, ServerTime
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Capture, Confidence, Finding, RankRule, idle, worst_gaps
from warpwatch_diagnosis.rules.host_bound import HIGH_SHARE, MIN_SHARE
from warpwatch_diagnosis.words import milliseconds, percent, times

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
        server = _server(measures)
        what = "the GPU is idle" if measures.gpu else "the worker does nothing"
        yield (
            f"{what} for {percent(measures.share(lost))} of the time between two iterations, "
            "although requests are in flight"
        )
        gaps = [end - begin for begin, end in server.scheduling]
        spent = [i.end_us - i.begin_us for i in server.iterations]
        yield (
            f"the scheduler ran {times(len(gaps))} between iterations, "
            f"{milliseconds(median(gaps))} each in the median and {milliseconds(max(gaps))} at "
            f"most; a forward pass takes {milliseconds(median(spent))}"
        )
        yield from worst_gaps(measures, "scheduler")


class _UnavoidableRule(RankRule):
    """Finds time that cannot be won back, only avoided by other work."""

    def recoverable_us(self, measures: Measures, lost: Intervals) -> float:
        return 0.0

    def confidence(self, measures: Measures, lost: Intervals, recoverable_us: float) -> Confidence:
        return "high" if self.is_sure(measures, lost) else "medium"


class WaitingForWorkRule(_UnavoidableRule):
    """Finds the time without a request in flight, which is not a fault."""

    kind = "waiting_for_work"
    min_share = MIN_SHARE
    high_share = HIGH_SHARE

    def lost(self, measures: Measures) -> Intervals:
        waiting = _server(measures).waiting
        return intersection(waiting, measures.gpu.idle) if measures.gpu else waiting

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        yield (
            f"no request was in flight for {percent(measures.share(lost))} of the time: the server "
            "waited for work"
        )
        yield f"it waited {times(len(lost))}, {milliseconds(longest_us(lost))} at most"


class PrefillInterferenceRule(_UnavoidableRule):
    """Finds prompts whose computing makes requests that decode wait for their next token."""

    kind = "prefill_interference"
    min_share = 0.25
    high_share = 0.50

    def lost(self, measures: Measures) -> Intervals:
        usual_us = _usual_us(measures) or math.inf
        return [
            (begin + usual_us, end) for begin, end in _stalls(measures) if end - begin > usual_us
        ]

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        stalls = [end - begin for begin, end in _stalls(measures)]
        long = median(stalls) >= MIN_STALL_RATIO * (_usual_us(measures) or math.inf)
        return long and super().applies(measures, lost, several)

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        stalls = [end - begin for begin, end in _stalls(measures)]
        yield (
            f"requests that decode wait for the prompts of others {percent(measures.share(lost))} "
            "of the time"
        )
        yield (
            f"an iteration with prompts takes {milliseconds(median(stalls))}, "
            f"{milliseconds(max(stalls))} at most, one that only decodes "
            f"{milliseconds(_usual_us(measures) or 0.0)}"
        )
        most = max(i.prefill_tokens for i in _server(measures).iterations)
        if most:
            yield f"they compute up to {most:,} tokens of prompts at once"


def _server(measures: Measures) -> ServerTime:
    return measures.server or NO_SERVER


def _spans(measures: Measures) -> Iterable[tuple[Iteration, Interval]]:
    server = _server(measures)
    return zip(server.iterations, server.spans, strict=True)


def _usual_us(measures: Measures) -> float | None:
    """Return the median time of iterations that only decode, or None if there are too few."""
    found = [end - begin for i, (begin, end) in _spans(measures) if not i.prefill_requests]
    return median(found) if len(found) >= MIN_DECODING else None


def _stalls(measures: Measures) -> Intervals:
    """Return the iterations that compute prompts while requests that decode are in flight."""
    return [span for i, span in _spans(measures) if i.prefill_requests and i.in_flight]


class KvThrashRule(RankRule):
    """Finds requests that lose their place in the KV cache, whose tokens are computed again."""

    kind = "kv_thrash"
    high_share = 0.05

    def lost(self, measures: Measures) -> Intervals:
        preempted = sum(i.preempted for i in _server(measures).iterations)
        return self._recomputing(measures, preempted) if preempted else []

    def _recomputing(self, measures: Measures, preempted: int) -> Intervals:
        """Return the last iterations that compute prompts, as many as requests were preempted."""
        prompts = [span for i, span in _spans(measures) if i.prefill_requests]
        return prompts[-preempted:] or [span for i, span in _spans(measures) if i.preempted]

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        iterations = _server(measures).iterations
        preempting = sum(i.preempted > 0 for i in iterations)
        return preempting >= max(MIN_PREEMPTING, MIN_PREEMPTING_SHARE * len(iterations))

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        iterations = _server(measures).iterations
        yield (
            f"{sum(i.preempted for i in iterations):,} requests lost their place in the KV cache "
            f"in {len(iterations):,} iterations; what they had is computed again"
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
            sentence = "requests lose their place in the KV cache and are computed again"
            more = () if lost else ("the captured iterations only decode",)
            finding = self.finding_of(measures, lost)
            found.append(replace(finding, confidence="medium", evidence=(sentence, *more)))
        return found
