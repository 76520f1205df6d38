"""Giving the hardware counters up while a capture needs them, and never for longer.

DCGM's profiling and tools that read the same counters exclude each other. A pause holds for every
client of the host engine and outlives its own client, so whoever paused must resume.
"""

from __future__ import annotations

import logging

from warpwatch_devices.dcgm.bindings import DcgmRefused, HostEngine

logger = logging.getLogger(__name__)

MAX_PAUSE_S = 600.0


class ProfilingPause:
    """Whether profiling is paused by us. Times are of the monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._since: float | None = None
        # Wanted, but over: it lasted too long, or the host engine does not do it.
        self._given_up = False
        self.reason = ""

    @property
    def active(self) -> bool:
        return self._since is not None

    def follow(self, engine: HostEngine, wanted: bool, now: float) -> bool:
        """Pause and resume as wanted; True where that changed. Raises DcgmUnavailable."""
        if not wanted:
            self._given_up = False
        if self._since is None:
            return wanted and not self._given_up and self._begin(engine, now)
        too_long = now - self._since > MAX_PAUSE_S
        if wanted and not too_long:
            return False
        if wanted:
            self._given_up = True
            logger.warning("profiling is resumed: a capture kept it paused too long")
        self.end(engine)
        return True

    def connected(self, engine: HostEngine) -> None:
        """After the connection was lost during a pause: that one may still hold."""
        if self._since is not None:
            self.end(engine)

    def end(self, engine: HostEngine) -> None:
        """Raises DcgmUnavailable, and the pause is then still to be ended."""
        if self._since is None:
            return
        try:
            engine.resume()
        except DcgmRefused as refused:
            logger.warning("DCGM does not resume profiling: %s", refused)
        self._since = None
        self.reason = ""

    def _begin(self, engine: HostEngine, now: float) -> bool:
        try:
            engine.pause()
        except DcgmRefused as refused:
            self._given_up = True
            logger.warning("DCGM does not pause profiling: %s", refused)
            return False
        self._since = now
        self.reason = "profiling is paused for a capture"
        return True
