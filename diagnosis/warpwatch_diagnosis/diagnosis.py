"""Diagnoses trace files: reads each one, measures it, concludes."""

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
    """Diagnose the ranks of one capture; ``baseline`` has traces of the same job when healthy.

    A trace may be its reduction. missing: ranks without a trace, and why. nodes: the nodes of
    ranks, to be named. asked: the anomaly that the capture is of. reading: receives the number of
    the file that is read next, their count, and its name. Raises TraceError for the first unusable
    file, and for files that are not ranks of one capture.
    """
    count = len(paths) + len(baseline)
    numbers = itertools.count()

    def read(path: TraceSource) -> Measures:
        reading(next(numbers), count, path.name)
        return _read(path)

    ranks, where = _measures(map(read, paths)), nodes or {}
    capture = [replace(m, node=None if m.rank is None else where.get(m.rank)) for m in ranks]
    check_one_capture(capture)
    well = _measures(map(read, baseline))
    reading(count, count, "")
    return conclude(capture, well, missing, asked)


def _measures(read: Iterable[Measures]) -> list[Measures]:
    """Read one file after the other, so that only one trace is in memory."""
    with without_collection():
        measured = list(read)
    return sorted(measured, key=lambda m: (m.rank is None, m.rank or 0, m.file))


def _read(path: TraceSource) -> Measures:
    return read_reduction(path) if path.name.endswith(REDUCTION) else measure(read_trace(path))
