"""How much one peer may ask for: token buckets a peer, in a table that cannot grow."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

# Far above what Prometheus, probes and some open pages send together from one address.
RATE_PER_S = 50.0
BURST = 200.0
# Of the server's thread, in seconds: a page costs some hundredths, a scrape some thousandths.
COST_PER_S = 0.1
COST_BURST_S = 2.0
MAX_PEERS = 1024


@dataclass(slots=True)
class _Bucket:
    requests: float
    cost_s: float
    since: float


class PeerLimit:
    """``rate_per_s`` requests a second, ``burst`` at once, and what they cost in the same way.

    The longest silent peer is forgotten.
    """

    def __init__(
        self,
        rate_per_s: float = RATE_PER_S,
        burst: float = BURST,
        max_peers: int = MAX_PEERS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._max_peers = max_peers
        self._clock = clock
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_s(self, peer: str) -> float:
        """0 when the request is admitted, else the seconds until the next one would be."""
        bucket = self._refilled(peer)
        wait_s = max(
            (1 - bucket.requests) / self._rate_per_s if bucket.requests < 1 else 0.0,
            -bucket.cost_s / COST_PER_S,
            0.0,
        )
        if wait_s == 0:
            bucket.requests -= 1
        return wait_s

    def charge(self, peer: str, cost_s: float) -> None:
        """A request of the peer that was admitted has cost this much."""
        bucket = self._buckets.get(peer)
        if bucket is not None:
            bucket.cost_s -= cost_s

    def _refilled(self, peer: str) -> _Bucket:
        now = self._clock()
        bucket = self._buckets.pop(peer, None) or _Bucket(self._burst, COST_BURST_S, now)
        passed_s = now - bucket.since
        bucket.requests = min(self._burst, bucket.requests + passed_s * self._rate_per_s)
        bucket.cost_s = min(COST_BURST_S, bucket.cost_s + passed_s * COST_PER_S)
        bucket.since = now
        self._buckets[peer] = bucket
        if len(self._buckets) > self._max_peers:
            self._buckets.popitem(last=False)
        return bucket
