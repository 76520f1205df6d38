"""A capture's folder, as a daemon that starts reads it: capture.json and diagnosis.json."""

import json
from dataclasses import replace
from pathlib import Path

from tests.daemon.http.conftest import CAPTURE
from tests.fuzz.shown import check_shown
from tests.fuzz.watch import Target, json_tokens
from warpwatch_capturing.config import StoreConfig
from warpwatch_capturing.store import Store
from warpwatch_telemetry.state import State

# The first byte of an input: which of the two files the rest is.
RECORD, DIAGNOSIS = b"\0", b"\1"
TOLD = {
    "verdict": "data_loading", "summary": "rank 1 waits",
    "findings": [{"kind": "data_loading", "share": 0.73, "advice": "Set num_workers"}],
    "traces": [{"window_s": 1.0, "steps": 5, "roofline": {"mfu_ratio": 0.3}}],
}  # fmt: skip


def target(folder: Path) -> Target:
    store = Store(StoreConfig(url=f"file://{folder}/store"))
    path = store.folder(CAPTURE.id, CAPTURE.time)
    store.create(replace(CAPTURE, folder=str(path), diagnosis=None))
    record, diagnosis = (path / "capture.json").read_bytes(), json.dumps(TOLD).encode()

    def run(data: bytes) -> None:
        is_record = data[:1] != DIAGNOSIS
        (path / "capture.json").write_bytes(data[1:] if is_record else record)
        (path / "diagnosis.json").write_bytes(diagnosis if is_record else data[1:])
        captures = tuple(store.load(with_diagnosis=8))
        assert is_record or captures
        check_shown(State(CAPTURE.time, "1", "gpu-1", captures=captures))

    seeds = [RECORD + record, DIAGNOSIS + diagnosis]
    words = b'"request": "ranks": "findings": "share": "traces": 1e300 -1'
    return Target(run, seeds, (*json_tokens(words), b'"schema": 1'), 1 + 2 * len(record))
