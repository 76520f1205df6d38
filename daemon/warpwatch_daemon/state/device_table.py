"""What several sources know of one device, made into one sample: never two values for one metric.

Which source is believed is declared in the catalogue (``Metric.precedence``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.metric import DEVICE_PRECEDENCE, SeriesKey
from warpwatch_telemetry.samples import DeviceSample

# When its most trusted source finds a device in such a state, values from other sources are old.
_NOT_READABLE = frozenset({"lost", "stuck", "reset_required", "driver"})


class _Published(NamedTuple):
    at: float
    sample: DeviceSample


class DeviceTable:
    """The newest sample of every device from every source. Not for several threads at once.

    ``stale_after_s``: by source, how long its values are believed; ``default_s`` for others.
    Times are of the monotonic clock: a wall clock that is set makes nothing old or young.
    """

    def __init__(self, default_s: float, stale_after_s: Mapping[str, float] | None = None) -> None:
        self._default_s = default_s
        self._stale_after_s = dict(stale_after_s or {})
        self._devices: dict[str, dict[str, _Published]] = {}

    def put(self, sample: DeviceSample, at: float) -> DeviceSample | None:
        """Keep it, published ``at``; returns what of it is believed, None for nothing."""
        sample = _read(sample)
        by_source = self._devices.setdefault(sample.device.uuid, {})
        known = sample.source in by_source
        by_source[sample.source] = _Published(at, sample)
        if not known:
            ordered = sorted(by_source.items(), key=lambda item: _rank(item[0]))
            by_source = self._devices[sample.device.uuid] = dict(ordered)
        in_order = [published.sample for published in by_source.values()]
        first = in_order[0]
        if sample is first:
            return sample
        if not first.up and first.reason in _NOT_READABLE:
            return None
        own = {
            key: value for key, value in sample.values.items() if _believed(key, in_order) is sample
        }
        return replace(sample, values=own) if own and sample.up else None

    def forget(self, uuid: str, source: str) -> None:
        by_source = self._devices.get(uuid, {})
        by_source.pop(source, None)
        if not by_source:
            self._devices.pop(uuid, None)

    def merged(self, now: float) -> tuple[DeviceSample, ...]:
        """One sample a device, by index and instance; values that were not read again are gone."""
        samples = (self._merge(by_source, now) for by_source in self._devices.values())
        return tuple(sorted(samples, key=_place))

    def _merge(self, by_source: Mapping[str, _Published], now: float) -> DeviceSample:
        samples = [self._fresh(published, now) for published in by_source.values()]
        first = samples[0]
        if len(samples) == 1 or (not first.up and first.reason in _NOT_READABLE):
            return first
        readable = [sample for sample in samples if sample.up]
        if not readable:
            return first
        # A source that cannot read the device still has what is known without asking it.
        keys = {key: None for sample in samples for key in sample.values}
        values = {key: _believed(key, samples).values[key] for key in keys}
        time = readable[0].time
        processes = next((sample.processes for sample in readable if sample.processes), ())
        return DeviceSample(first.device, time, values, processes=processes, source=first.source)

    def _fresh(self, published: _Published, now: float) -> DeviceSample:
        sample = published.sample
        limit_s = self._stale_after_s.get(sample.source, self._default_s)
        if not sample.up or now - published.at <= limit_s:
            return sample
        return replace(sample, values={}, up=False, reason="stale", processes=())


def _read(sample: DeviceSample) -> DeviceSample:
    """Return the sample without what is no number: an unknown value is absent."""
    values = sample.values
    if all(map(math.isfinite, values.values())):
        return sample
    finite = {key: value for key, value in values.items() if math.isfinite(value)}
    return replace(sample, values=finite)


def _rank(source: str, precedence: tuple[str, ...] = DEVICE_PRECEDENCE) -> int:
    return precedence.index(source) if source in precedence else len(precedence)


def _believed(key: SeriesKey, samples: Sequence[DeviceSample]) -> DeviceSample:
    """Of the samples that have the series, the one that the catalogue puts first."""
    row = CATALOGUE.get(key[0])
    precedence = row.precedence if row else DEVICE_PRECEDENCE
    having = (sample for sample in samples if key in sample.values)
    return min(having, key=lambda sample: _rank(sample.source, precedence))


def _place(sample: DeviceSample) -> tuple[int, int, str]:
    instance = sample.device.gpu_instance
    return sample.device.index, int(instance) if instance.isdigit() else -1, sample.device.uuid
