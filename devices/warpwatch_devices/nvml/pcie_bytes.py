"""The PCIe byte counters of a GPU: of GPM's rates where it has them, else of two fields.

The fields may have 32 bits only, which a fast link fills several times a second. What is lost then
cannot be known, so that such a field counts only where the link cannot carry that much between two
readings. Totals outlive handles, and go on where they are when their source changes.
"""

from __future__ import annotations

from collections.abc import Mapping

from warpwatch_telemetry.metric import SeriesKey, Values

PCIE_BYTES: tuple[SeriesKey, ...] = (
    ("device_pcie_receive_bytes_total", ()),
    ("device_pcie_transmit_bytes_total", ()),
)
_GENERATION: SeriesKey = ("device_pcie_link_generation_max", ())
_WIDTH: SeriesKey = ("device_pcie_link_width_max_lanes", ())
_WRAP = 2**32
# 2.5 GT/s with 8 bits of 10 (PCI Express Base Specification 1.1). No generation more than doubles
# the one before.
_FIRST_LANE_BYTES_PER_S = 250_000_000
# After so many rounds without GPM the fields are counted, if they can be.
PATIENCE_ROUNDS = 10


class ContinuedCounter:
    """A total of what several counters count, one at a time."""

    def __init__(self) -> None:
        self._total: float | None = None
        self._newest: tuple[str, float] = ("", 0.0)

    def total(self, source: str, raw: float, wrap: int = 0) -> float:
        """Add what ``source`` has counted since it was asked last; if it was another one that was
        asked, that is not known and adds nothing.

        wrap: where the counter starts over. One that falls without has started again.
        """
        last_source, before = self._newest
        self._newest = (source, raw)
        if self._total is None:
            self._total = raw
        elif last_source == source:
            self._total += _growth(before, raw, wrap)
        return self._total

    def interrupt(self) -> None:
        """What is counted from now until it is asked for again is not known."""
        self._newest = ("", 0.0)


def _growth(before: float, now: float, wrap: int) -> float:
    if now >= before:
        return now - before
    return now - before + wrap if wrap else now


class PcieBytes:
    """Of one GPU that is read every ``interval_s`` seconds."""

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._counters = {key: ContinuedCounter() for key in PCIE_BYTES}
        self._wide = False
        self._rounds_without = PATIENCE_ROUNDS

    def begin(self) -> None:
        """The handle is new, or MIG was turned on or off: GPM may be there no more, or again."""
        self._rounds_without = PATIENCE_ROUNDS
        if not self._wide:
            for counter in self._counters.values():
                counter.interrupt()

    def count(self, values: Values, gpm: Mapping[SeriesKey, float]) -> None:
        """Put totals in place of what the fields say, or nothing where that is not known."""
        fields = {key: values.pop(key) for key in PCIE_BYTES if key in values}
        self._wide = self._wide or any(raw >= _WRAP for raw in fields.values())
        if any(key in gpm for key in PCIE_BYTES):
            self._rounds_without = 0
            rates = {key: gpm[key] for key in PCIE_BYTES if key in gpm}
            values.update({k: self._counters[k].total("gpm", v) for k, v in rates.items()})
            return
        self._rounds_without += 1
        if self._rounds_without <= PATIENCE_ROUNDS or not self._countable(values):
            return
        wrap = 0 if self._wide else _WRAP
        values.update({k: self._counters[k].total("fields", v, wrap) for k, v in fields.items()})

    def _countable(self, values: Values) -> bool:
        """Whether the fields cannot start over more than once between two readings."""
        if self._wide:
            return True
        generation, lanes = values.get(_GENERATION), values.get(_WIDTH)
        if generation is None or lanes is None:
            return False
        bytes_per_s = _FIRST_LANE_BYTES_PER_S * 2 ** (generation - 1) * lanes
        return bytes_per_s * self._interval_s < _WRAP
