"""Files fetched from a remote store, and the order in which captures are copied there."""

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.capturing.played import REQUEST
from tests.expressions import tried
from tests.manual_clock import ManualClock
from warpwatch_capturing.config import StoreConfig
from warpwatch_capturing.remote_store import RemoteStoreError, Uploads, fetch
from warpwatch_capturing.store import Store
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.captures import AnomalySeen, Capture, RankCapture

NOW, WELL = 1_790_000_000.0, "20260921T141320-000000"
TRACE = RankCapture(0, "written", file="rank0.json", verified=True)
LATE = RankCapture(1, "late", "step 9")
ANOMALY = replace(
    REQUEST, trigger="anomaly", anomaly_kind="straggler", anomaly_seen=AnomalySeen(1, 7, 1.5)
)
NODES = tuple(
    replace(TRACE, rank=n, file=f"rank{n}.pt.trace.json.gz", node=f"gpu-{n}") for n in range(3)
)
OF_NODES = ("rank0.reduction.gz", "rank2.reduction.gz", "baseline.rank0.gz", "report.html")
CAPTURES: dict[str, dict[str, Any]] = {
    "the baseline": {"ranks": (TRACE, replace(TRACE, rank=2, file="rank2.json", verified=False))},
    "one rank of two": {"ranks": (TRACE, LATE), "request": ANOMALY, "baseline_id": WELL},
    "its baseline is gone": {"ranks": (TRACE,), "baseline_id": "20260921T141320-ffffff"},
    "its baseline has an odd name": {"ranks": (TRACE,), "baseline_id": "../20260921T141320-000000"},
    "over nodes": {"ranks": (*NODES, replace(LATE, rank=7)), "files": OF_NODES},
    "stacks": {"ranks": (TRACE,), "request": replace(REQUEST, kind="stacks")},
    "memory": {"ranks": (TRACE,), "request": replace(REQUEST, kind="memory")},
    "no trace": {"ranks": (LATE,), "outcome": "failed"},
    "no trace, and why": {"ranks": (LATE,), "outcome": "failed", "detail": "rank 1: step 9"},
    "a file elsewhere": {"ranks": (replace(TRACE, file="../rank0.json"),)},
}


def saved(store: Store, number: int, **about: Any) -> Capture:
    ident = f"20260921T141320-{number:06x}"
    made = Capture(**{"id": ident, "request": REQUEST, "time": NOW + number, **about})
    made = replace(made, folder=str(store.folder(ident, NOW)))
    store.create(made)
    for name in (*made.files, *(rank.file for rank in made.ranks if rank.file)):
        Path(str(made.folder), name).write_text(f"{name} of {number}")
    return made


def test_what_is_fetched_of_a_capture_is_golden(tmp_path, golden_case):
    pytest.importorskip("obstore")
    store, lines = Store(StoreConfig(url=(tmp_path / "bucket").as_uri())), list[str]()
    addresses = {
        name: Path(str(saved(store, number, **about).folder)).as_uri() + "/"
        for number, (name, about) in enumerate(CAPTURES.items())
    }
    last = addresses["the baseline"]
    addresses |= {"one trace": f"{last}rank0.json", "nothing": last.replace("14132", "24132")}
    for number, (name, address) in enumerate(addresses.items()):
        (into := tmp_path / f"into{number}").mkdir()
        read: list[Any] = []
        found = tried(partial(fetch, address, into, lambda *what: read.append(what)))  # noqa: B023
        there = {path.name: path.read_text() for path in sorted(into.rglob("*.*"))}
        lines.append(f"{name}: {found}\n    reads {read}\n    has {there}\n")
    golden_case("".join(lines).replace(str(tmp_path), ""))


def test_captures_are_copied_in_the_golden_order(tmp_path, golden_case, caplog):
    caplog.set_level(logging.INFO, "warpwatch_capturing")
    store, clock, metrics = Store(StoreConfig(url=tmp_path.as_uri())), ManualClock(), AgentMetrics()
    names: dict[str, Any] = {"a": {}, "b": {}, "c": {"of_fleet": True}, "d": {"outcome": None}}
    names["e"] = {"ranks": NODES}
    known = {
        name: saved(store, number, **{"outcome": "complete", "files": ("x", "y"), **about})
        for number, (name, about) in enumerate(names.items())
    }
    by_id = {one.id: name for name, one in known.items()}
    fails, settled, lines = set[str](), set(known), list[str]()

    def put(key: str, content: Path | bytes) -> None:
        if any(part in key for part in fails):
            raise RemoteStoreError(f"{key}: refused")
        whole = content if isinstance(content, bytes) else content.read_bytes()
        said = json.loads(whole) if key.endswith("manifest.json") else len(whole)
        lines.append(f"    {key}: {said}")

    def update(ident: str, **changes: Any) -> None:
        known[by_id[ident]] = replace(known[by_id[ident]], **changes)
        lines.append(f"    {by_id[ident]} has {changes}")

    remote: Any = SimpleNamespace(url="s3://ours", put=put)
    register: Any = SimpleNamespace(all=lambda: list(known.values()), update=update)
    uploads = Uploads(
        remote, store.path, register, lambda ident: by_id[ident] in settled, metrics, "gpu 1/2",
        clock.monotonic,
    )  # fmt: skip
    folder = Path(str(known["d"].folder))
    later = partial(clock.advance, 120)
    ended = replace(known["d"], outcome="partial")
    moves: dict[str, list[Callable[[], object]]] = {
        "nothing can be copied": [partial(fails.add, "captures")],
        "too early": [partial(clock.advance, 4.9)],
        "a not as a whole": [later, fails.clear, partial(fails.add, "-000000/y")],
        "for the third time": [later],
        "for the fourth time": [later],
        "for the fifth, and b is not settled": [later, partial(settled.discard, "b")],
        "all but b": [later, fails.clear],
        "b is settled": [partial(settled.add, "b")],
        "d cannot be copied": [partial(fails.add, "-000003"), partial(known.update, d=ended)],
        "d has lost a file and its record": [
            later, fails.clear, (folder / "y").unlink, (folder / "capture.json").unlink,
        ],
        "d is removed": [partial(known.pop, "d")],
    }  # fmt: skip
    for said, changes in moves.items():
        for change in changes:
            change()
        lines.append(said)
        uploads.advance()
        lines += [f"    {one.levelname.lower()}: {one.getMessage()}" for one in caplog.records]
        caplog.clear()
        for family in metrics.registry.collect():
            lines += [
                f"    {one.name} {'/'.join(one.labels.values())}: {one.value:g}"
                for one in family.samples
                if "upload" in one.name and "created" not in one.name
            ]
    golden_case("".join(f"{line}\n" for line in lines))
