"""One diagnosis of all nodes: real reductions, fetched over HTTP."""

import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.daemon.captures.capture_node import MANUAL
from tests.fleet.capturing import PlayedFleet
from warpwatch_capturing import confinement, store
from warpwatch_capturing.remote_store import RemoteStore, Uploads
from warpwatch_daemon.cli.diagnose import main as diagnose
from warpwatch_daemon.state.hub import Hub
from warpwatch_fleet.captures.requests import FleetCaptures
from warpwatch_serving.page.captures import describe
from warpwatch_telemetry.captures import Capture, remote_place

RANKS = range(4)


def captured(fleet: PlayedFleet) -> tuple[FleetCaptures, Capture]:
    captures = fleet.run(lambda captures: captures.start(MANUAL))
    return captures, captures.shown()[-1]


def own_files() -> set[str]:
    reductions = {f"rank{rank}.reduction.gz" for rank in RANKS}
    return reductions | {"diagnosis.json", "report.html", "capture.json"}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_all_nodes_are_diagnosed_as_one_and_their_files_are_the_fleets_to_give(tmp_path, stack):
    # Each file of a stranger is read in a process of its own.
    fleet = PlayedFleet(tmp_path, stack, run=confinement.run)
    captures, capture = captured(fleet)
    assert (capture.outcome, capture.detail, capture.diagnosis_outcome) == ("complete", "", "ok")
    traces = [f"rank{rank}.pt.trace.json.gz" for rank in RANKS]
    assert set(capture.files) == own_files() - {"capture.json"} | set(traces)
    folder = Path(str(capture.folder))
    assert names_in(folder) == own_files()
    found = json.loads((folder / "diagnosis.json").read_text())
    nodes = [(one["rank"], one["node"]) for one in found["traces"]]
    assert nodes == [(0, "gpu-1"), (1, "gpu-1"), (2, "gpu-2"), (3, "gpu-2")]
    assert capture.diagnosis is not None
    assert capture.diagnosis["summary"] == found["summary"]
    # The nodes, which read two ranks each, have no verdict of their own, also after a restart.
    for agent in fleet.agents:
        for part in (*agent.captures(), *agent.node.store.load(1)):
            assert (part.diagnosis, part.diagnosis_outcome) == (None, "ok")
            assert not {"diagnosis.json", "report.html"} & {*part.files}
            assert describe(part) == (
                "part of a multi-node capture",
                "the fleet has its verdict",
                "",
            )

    chunks = captures.download(capture.id, traces[3], None)
    (theirs,) = fleet.agents[1].node.store.path.glob(f"*/*/*/{capture.id}*/{traces[3]}")
    assert chunks is not None
    assert b"".join(chunks) == theirs.read_bytes()
    for name, owner in (("report.html", None), ("diagnosis.json", None), (traces[3], "ns/other")):
        assert captures.download(capture.id, name, owner) is None

    # Another fleet on the same folder has it still.
    again = PlayedFleet(tmp_path, stack, fleet.agents).run(lambda captures: None).shown()
    assert [(one.id, one.files, one.diagnosis) for one in again] == [
        (capture.id, capture.files, capture.diagnosis)
    ]


def test_a_rank_whose_reduction_is_none_is_named_with_its_node_and_costs_the_others_nothing(
    fleet, monkeypatch
):
    give = fleet.agents[1].capture_file

    def damaged(capture_id: str, name: str, owner: str | None) -> Path | None:
        path = give(capture_id, name, owner)
        if path is not None and name == "rank3.reduction.gz":
            path.write_bytes(b"<html>")
        return None if name == "rank2.reduction.gz" else path

    monkeypatch.setattr(fleet.agents[1], "capture_file", damaged)
    _, capture = captured(fleet)
    assert capture.outcome == "partial"
    first, second = capture.detail.split("; ")
    assert first.startswith("gpu-2: rank 2: 404 for captures/")
    assert second.startswith("gpu-2: rank 3: no reduction of this version")
    assert (capture.diagnosis or {})["verdict"] is not None
    found = json.loads((Path(str(capture.folder)) / "diagnosis.json").read_text())
    assert [one["rank"] for one in found["traces"]] == [0, 1]
    assert [rank.verified for rank in capture.ranks] == [True, True, False, False]
    one = replace(capture, files=("rank1.reduction.gz",))
    assert store.reductions(one) == ["rank1.reduction.gz"]


def test_all_of_a_capture_lies_under_one_address_and_says_the_same_there(tmp_path, fleet, capsys):
    pytest.importorskip("obstore")
    # Only gpu-2 has taken one of the job in health.
    node = fleet.agents[1].node
    assert node.captured(replace(MANUAL, trigger="baseline")).outcome == "complete"
    fleet.advance(60)
    captures, capture = captured(fleet)
    of_baseline = {f"baseline.rank{rank}.reduction.gz" for rank in (2, 3)}
    remote = RemoteStore((tmp_path / "bucket").as_uri())
    about = (captures.is_settled, Hub(1.0).metrics, "fleet")
    own = Uploads(remote, fleet.store.path, fleet.register, *about)
    own.advance()
    folder = tmp_path / "bucket" / "captures" / remote_place(capture.id)
    # All of its own is there, and not yet what the nodes have.
    assert names_in(folder) == (own_files() | of_baseline) - {"capture.json"}
    for agent in fleet.agents:
        node = agent.node
        for _ in range(3):
            node.poll(after_s=120)
            node.service.finish()
        about = (node.service.is_settled, node.hub.metrics, agent.name)
        Uploads(remote, node.store.path, node.service.register, *about).advance()
    fleet.hear()
    own.advance()
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["nodes"] == ["gpu-1", "gpu-2"]
    assert manifest["files"].keys() == own_files() | of_baseline
    for rank, name in enumerate(("gpu-1", "gpu-1", "gpu-2", "gpu-2")):
        theirs = {f"rank{rank}.pt.trace.json.gz", "capture.json", "manifest.json"}
        assert theirs <= names_in(folder / "nodes" / name)
    address = fleet.register.all()[-1].remote
    assert address == f"{folder.as_uri()}/"
    diagnose([address, "--json"])
    told, stored = json.loads(capsys.readouterr().out), folder / "diagnosis.json"
    assert told == json.loads(stored.read_text())
    assert told["comparison"] != []


def test_without_room_of_its_own_the_fleet_leaves_a_capture_to_its_nodes(fleet):
    year = datetime.fromtimestamp(fleet.clock.wall(), UTC).year
    (fleet.store.path / str(year)).write_text("no folder")
    captures, capture = captured(fleet)
    assert (capture.outcome, capture.detail) == ("complete", "not diagnosed: Not a directory")
    assert captures.download(capture.id, "rank3.pt.trace.json.gz", None) is not None
