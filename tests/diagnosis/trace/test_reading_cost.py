"""What a small trace can cost whoever reads it; without bounds each of these takes minutes."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.diagnosis.hostile_traces import HOSTILE, write_hostile
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.trace import json_stream
from warpwatch_diagnosis.trace.errors import TraceError
from warpwatch_diagnosis.trace.inventory import take_inventory
from warpwatch_diagnosis.trace.reader import read_trace

# On a slow core; all of them take under three seconds here.
MAX_CPU_S = 15.0


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_small_trace_costs_seconds_at_most(tmp_path: Path, kind: str) -> None:
    path = write_hostile(kind, tmp_path / "rank0.json.gz")
    assert path.stat().st_size < 130_000
    begin_s = time.process_time()
    with suppress(TraceError):
        take_inventory(path)
    with suppress(TraceError):
        diagnose([path])
    assert time.process_time() - begin_s < MAX_CPU_S


def test_a_file_that_grows_too_much_is_refused(tmp_path: Path) -> None:
    path = write_hostile("long names", tmp_path / "rank0.json.gz")
    with pytest.raises(TraceError, match=r"more than 2.,...,... bytes decompressed"):
        read_trace(path)


def test_values_that_are_no_events_are_read_up_to_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json_stream, "MAX_SINGLE_VALUES", 100)
    path = tmp_path / "odd.json"
    event = '{"ph":"X","cat":"cpu_op","name":"aten::mm","ts":5,"dur":1}'
    path.write_text(f"[{'0,' * 99}{event}]")
    assert read_trace(path).count == 1
    path.write_text(f"[{'0,' * 101}{event}]")
    with pytest.raises(TraceError, match="more than 100 values that are no events"):
        read_trace(path)
