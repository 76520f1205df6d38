"""How many requests one peer may send: a token bucket a peer, in a table that cannot grow."""

from __future__ import annotations

import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable

# Far above what Prometheus, probes and some open pages send together from one address.
RATE_PER_S = 50.0
BURST = 200.0
MAX_PEERS = 1024


class PeerLimit:
    """``rate_per_s`` requests a second, ``burst`` at once; the longest silent peer is forgotten."""

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
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, peer: str) -> float:
        """0 when the request is admitted, else the seconds until the next one would be."""
        key = _network(peer)
        now = self._clock()
        tokens, since = self._buckets.pop(key, (self._burst, now))
        tokens = min(self._burst, tokens + (now - since) * self._rate_per_s)
        admitted = tokens >= 1
        self._buckets[key] = (tokens - 1 if admitted else tokens, now)
        if len(self._buckets) > self._max_peers:
            self._buckets.popitem(last=False)
        return 0.0 if admitted else (1 - tokens) / self._rate_per_s


def _network(peer: str) -> str:
    """One host owns a whole /64 of IPv6 addresses, so they share a bucket."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.ip_network((address, 64), strict=False))
    return peer
