"""From trace files to a diagnosis: read each file, measure it, conclude."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from warpwatch_diagnosis.measures.measures import Measures, measure
from warpwatch_diagnosis.measures.reduction import read_reduction
from warpwatch_diagnosis.trace.files import REDUCTION, TraceSource
from warpwatch_diagnosis.trace.reader import read_trace, without_collection
from warpwatch_diagnosis.verdict.conclusion import Diagnosis, conclude
from warpwatch_diagnosis.verdict.doubts import check_one_capture
from warpwatch_diagnosis.verdict.findings import Asked


def diagnose(
    paths: Sequence[TraceSource],
    baseline: Sequence[TraceSource] = (),
    missing: Mapping[int, str] | None = None,
    nodes: Mapping[int, str] | None = None,
    asked: Asked | None = None,
    reading: Callable[[int, int, str], None] = lambda number, count, name: None,
) -> Diagnosis:
    """Diagnose the ranks of one capture together; ``baseline``: traces of the same job when well.

    A trace may be its reduction. ``missing``: ranks that are known to have brought no trace, and
    why. ``nodes``: where ranks ran, to be named. ``asked``: the anomaly that the capture is of.
    ``reading`` hears which file of how many is read now, and that all were.
    Raises TraceError for the first file that cannot be used, and for files that are not ranks of
    one capture.
    """
    count = len(paths) + len(baseline)
    numbers = itertools.count()

    def read(path: TraceSource) -> Measures:
        reading(next(numbers), count, path.name)
        return _read(path)

    capture = [_placed(m, nodes or {}) for m in _measures(map(read, paths))]
    check_one_capture(capture)
    well = _measures(map(read, baseline))
    reading(count, count, "")
    return conclude(capture, well, missing, asked)


def _measures(read: Iterable[Measures]) -> list[Measures]:
    """One file after the other: a trace's events are gone before the next is read."""
    with without_collection():
        measured = list(read)
    return sorted(measured, key=lambda m: (m.rank is None, m.rank or 0, m.file))


def _placed(measures: Measures, nodes: Mapping[int, str]) -> Measures:
    return replace(measures, node=None if measures.rank is None else nodes.get(measures.rank))


def _read(path: TraceSource) -> Measures:
    return read_reduction(path) if path.name.endswith(REDUCTION) else measure(read_trace(path))
