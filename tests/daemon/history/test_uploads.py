"""Captures on their way into a bucket that is slow, full, silent or away for a while."""

import json
import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from tests.daemon.captures.capture_node import AUTOMATIC, MANUAL, CaptureNode
from tests.daemon.history.object_store import URL, Bucket, bucket
from tests.daemon.state.counted import counted
from tests.waiting import DEADLINE_S
from warpwatch_capturing import remote_store
from warpwatch_capturing.remote_store import RemoteStore, RemoteStoreError, Uploads
from warpwatch_capturing.store import Store
from warpwatch_daemon.cli.diagnose import main as diagnose
from warpwatch_telemetry.captures import AnomalySeen, Capture, CaptureRequest
from warpwatch_telemetry.errors import UsageError

pytest.importorskip("obstore")


@pytest.fixture(scope="module")
def one_bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with bucket(tmp_path_factory.mktemp("s3") / "buckets") as found:
        yield found


@pytest.fixture
def s3(one_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """With nothing in it, and hardly tried again within one put."""
    for path in [path for path in one_bucket.folder.rglob("*") if path.is_file()]:
        path.unlink()
    one_bucket.set("pass")
    one_bucket.seen.clear()
    for name, value in one_bucket.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(remote_store, "REQUEST_TIMEOUT_S", DEADLINE_S)
    soon = timedelta(milliseconds=1)
    backoff = {"init_backoff": soon, "max_backoff": 2 * soon, "base": 2}
    retry = {"max_retries": 1, "retry_timeout": timedelta(seconds=DEADLINE_S), "backoff": backoff}
    monkeypatch.setattr(remote_store, "_RETRY", retry)
    return one_bucket


class Node(CaptureNode):
    def connect(self) -> None:
        service = self.service
        self.uploads = Uploads(
            RemoteStore(URL),
            self.store.path,
            service.register,
            service.is_settled,
            self.hub.metrics,
            "node1",
            self.clock.monotonic,
        )

    def priced(self, *ranks: int, request: CaptureRequest = MANUAL) -> Capture:
        """A capture of both ranks to which these brought their traces; its price is known."""
        asked = self.service.request(request)
        for rank in ranks or (0, 1):
            self.deliver(rank)
        self.poll()
        self.poll(after_s=120)
        self.poll(after_s=120)
        return self.finished(asked)

    def sent(self, capture: Capture) -> Capture:
        self.clock.advance(120)
        self.uploads.advance()
        return self.capture(capture)

    def uploaded(self, outcome: str) -> float | None:
        return counted(self.hub, "uploads_total", "capture", outcome)

    @property
    def pending(self) -> float | None:
        return counted(self.hub, "uploads_pending", "capture")


@pytest.fixture
def node(tmp_path: Path, stack: ExitStack, s3: Bucket) -> Node:
    return Node(tmp_path, stack)


def place(capture: Capture) -> str:
    year, month, day = capture.id[:4], capture.id[4:6], capture.id[6:8]
    return f"gpus/captures/{year}/{month}/{day}/{capture.id}"


def whole(capture: Capture) -> list[str]:
    names = [*capture.files, "capture.json", "manifest.json"]
    return sorted(f"{place(capture)}/{name}" for name in names)


def puts(s3: Bucket) -> list[str]:
    return [line.rpartition("/")[2] for line in s3.seen if line.startswith("PUT ")]


def test_a_capture_is_copied_whole_and_the_manifest_last(node, s3):
    capture = node.sent(node.priced())
    assert capture.outcome == "complete"
    assert capture.remote == f"s3://ours/{place(capture)}/"
    assert s3.objects() == whole(capture)
    assert {"diagnosis.json", "report.html", "rank1.pt.trace.json.gz"} <= set(puts(s3))
    assert puts(s3)[-2:] == ["capture.json", "manifest.json"]
    folder = Path(str(capture.folder))
    for name in capture.files:
        assert (s3.folder / place(capture) / name).read_bytes() == (folder / name).read_bytes()
    manifest = json.loads((s3.folder / place(capture) / "manifest.json").read_text())
    assert (manifest["schema"], manifest["capture"], manifest["node"]) == (1, capture.id, "node1")
    sizes = {p.name: p.stat().st_size for p in (s3.folder / place(capture)).iterdir()}
    assert manifest["files"] == {k: v for k, v in sizes.items() if k != "manifest.json"}
    assert (node.uploaded("uploaded"), node.uploaded("failed")) == (1, 0)
    assert counted(node.hub, "upload_bytes_total") == sum(sizes.values())
    assert node.pending == 0
    # Nothing is listed, looked for or deleted.
    assert {line.partition(" ")[0] for line in s3.seen} == {"PUT"}


def test_a_capture_that_is_there_is_not_copied_again(node, s3):
    s3.set("refuse")
    capture = node.priced()
    assert node.sent(capture).remote is None
    # Another daemon goes on where the first was killed.
    node.restart()
    assert node.pending == 1
    s3.set("pass")
    capture = node.sent(capture)
    assert s3.objects() == whole(capture)
    before = len(s3.seen)
    node.sent(capture)
    node.restart()
    assert node.sent(capture).remote is not None
    assert len(s3.seen) == before
    assert Store(node.store.config).load(1)[0].remote == capture.remote


@pytest.mark.parametrize("mode", ["refuse", "silent", 503, 507, 403, 404])
def test_what_could_not_be_copied_comes_later_and_once(node, s3, monkeypatch, mode):
    first, second = node.priced(), node.priced(0)
    s3.set(mode)
    if mode == "silent":
        monkeypatch.setattr(remote_store, "REQUEST_TIMEOUT_S", 0.1)
        node.connect()
    assert node.sent(first).remote is None
    assert node.sent(second).remote is None
    assert not any("manifest" in name for name in s3.objects())
    assert (node.uploaded("uploaded"), node.uploaded("failed")) == (0, 2)
    assert node.pending == 2
    s3.set("pass")
    s3.seen.clear()
    if mode == "silent":
        monkeypatch.setattr(remote_store, "REQUEST_TIMEOUT_S", DEADLINE_S)
        node.connect()
    assert node.sent(first).remote is not None
    assert node.capture(second).remote is not None
    assert s3.objects() == sorted(whole(node.capture(first)) + whole(node.capture(second)))
    manifests = [line for line in s3.seen if line.endswith("manifest.json")]
    assert [first.id in line for line in manifests] == [True, False]


def test_it_is_tried_ever_less_often(node, s3, caplog):
    capture = node.priced()
    s3.set(403)
    for _ in range(60):
        node.clock.advance(5)
        node.uploads.advance()
    # After 5, 10, 20, 40, 80 and then each 120 s.
    assert node.uploaded("failed") == 7
    said = f"cannot upload capture {capture.id}, trying again: s3://ours/{place(capture)}/rank"
    assert caplog.text.count(said) == 1
    s3.set("pass")
    assert node.sent(capture).remote is not None
    # The next failure is a first one again.
    node.priced()
    s3.set(403)
    node.sent(capture)
    node.clock.advance(5)
    node.uploads.advance()
    assert node.uploaded("failed") == 9


def test_a_large_trace_goes_in_parts(node, s3):
    content = random.Random(0).randbytes(12 << 20)
    path = node.store.path / "large"
    path.write_bytes(content)
    RemoteStore(URL).put("large", path)
    assert (s3.folder / "gpus/large").read_bytes() == content
    assert sum("partNumber=" in line for line in s3.seen) == 3


def test_a_diagnosis_from_the_bucket_is_that_of_the_daemon(node, s3, capsys):
    def diagnosis(*address: str) -> object:
        assert diagnose(["--json", *address]) in (0, 1)
        return json.loads(capsys.readouterr().out)

    well = node.priced(request=replace(MANUAL, trigger="baseline"))
    # Rank 1 brings nothing, and the diagnosis compares with the one before, and with what asked.
    seen = AnomalySeen(rank=0, begin_step=7, ratio=1.6)
    capture = node.sent(node.priced(0, request=replace(AUTOMATIC, anomaly_seen=seen)))
    assert (capture.outcome, capture.baseline_id) == ("partial", well.id)
    capture = node.sent(capture)
    local = json.loads(Path(str(capture.folder), "diagnosis.json").read_text())
    assert "straggler of rank 0 since step 7" in json.dumps(local)
    assert diagnosis(str(capture.remote)) == local
    # A baseline that the user names is the only one.
    own = str(Path(str(capture.folder), "rank0.pt.trace.json.gz"))
    named = diagnosis(str(capture.remote), "--baseline", own)
    assert named == diagnosis(str(capture.remote), f"--baseline={own}") != local
    # Without its own description it is another capture.
    assert diagnosis(f"{capture.remote}rank0.pt.trace.json.gz") != local


def test_an_address_without_a_capture_is_named_in_one_line(s3):
    with pytest.raises(UsageError, match=r"^s3://ours/gpus/no is not a capture, or is incomplete"):
        diagnose(["s3://ours/gpus/no"])
    RemoteStore(URL).put("c/capture.json", b"[]")
    with pytest.raises(UsageError, match=r"^s3://ours/gpus/c/capture.json is not a readable rec"):
        diagnose(["s3://ours/gpus/c/"])
    RemoteStore(URL).put("c/capture.json", bytes(2**24))
    with pytest.raises(UsageError, match="is not a readable record"):
        diagnose(["s3://ours/gpus/c/"])
    RemoteStore(URL).put("c/capture.json", bytes(2**24 + 1))
    with pytest.raises(RemoteStoreError, match=r"/c/capture.json: more than 16777216 bytes"):
        diagnose(["s3://ours/gpus/c/"])


def test_without_obstore_the_configuration_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match=r"needs obstore: install the extra warpwatch\[remote\]"):
        RemoteStore(tmp_path.as_uri())
