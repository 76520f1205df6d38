"""From trace files to a diagnosis: read each file, measure it, conclude."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warpwatch_diagnosis.comparison.completeness import check_one_capture
from warpwatch_diagnosis.measures.measures import Measures, measure
from warpwatch_diagnosis.trace.reader import TraceSource, read_trace, without_collection
from warpwatch_diagnosis.verdict.conclusion import Diagnosis, conclude


def diagnose(
    paths: Sequence[TraceSource],
    baseline: Sequence[TraceSource] = (),
    missing: Mapping[int, str] | None = None,
) -> Diagnosis:
    """Diagnose the ranks of one capture together; ``baseline``: traces of the same job when well.

    ``missing``: ranks that are known to have brought no trace, and why. Raises TraceError for the
    first file that cannot be used, and for files that are not ranks of one capture.
    """
    capture = _measures(paths)
    check_one_capture(capture)
    return conclude(capture, _measures(baseline), missing)


def _measures(paths: Sequence[TraceSource]) -> list[Measures]:
    """One file after the other: a trace's events are gone before the next is read."""
    with without_collection():
        measured = [measure(read_trace(path)) for path in paths]
    return sorted(measured, key=lambda m: (m.rank is None, m.rank or 0, m.file))
