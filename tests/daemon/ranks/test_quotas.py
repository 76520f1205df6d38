"""The inbox is everyone's: what is taken over from it, what of it goes, and who has too much."""

import errno
import itertools
import os
import subprocess
from pathlib import Path

import pytest

from tests.daemon.captures.capture_node import MANUAL, CaptureNode
from tests.daemon.ranks.sources import A, B, RankNode, made_later
from tests.waiting import DEADLINE_S
from warpwatch_capturing.participant import FetchError
from warpwatch_daemon.config import RendezvousConfig
from warpwatch_daemon.ranks import inbox, quotas
from warpwatch_daemon.ranks.quotas import Count, Quotas
from warpwatch_runtime.directory import Directory
from warpwatch_telemetry.errors import Refused

CONFIG = RendezvousConfig(owner_bytes=100 << 10)
USER = 1234
only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")


@pytest.fixture
def measured(node, monkeypatch):
    monkeypatch.setattr(quotas, "OWNER_FILES", 20)
    node.mount(A, B)
    return Quotas(node.folder, CONFIG, node.reject, node.clock.monotonic)


def fill(folder: Path, *names: str, kib: int = 40, uid: int = 0, after: str = "") -> None:
    """Files, the first after the file ``after``, each dated later than the one before it."""
    for name in names:
        (folder / name).write_bytes(os.urandom(kib << 10))
        if uid:
            os.chown(folder / name, uid, uid)
        if after:
            made_later(folder / name, than=folder / after)
        after = name


def test_the_oldest_files_of_a_pod_go_until_it_has_no_more_than_its_share(node, measured):
    fill(node.inbox(A), "1", "2", "3", "4")
    # A date is what its owner likes.
    os.utime(node.inbox(A) / "4", (1, 1))
    fill(node.inbox(A), "5", after="4")
    fill(node.inbox(B), "1", "2")
    (node.inbox(B) / "hole").touch()
    os.truncate(node.inbox(B) / "hole", 1 << 30)
    measured.measure()
    assert sorted(os.listdir(node.inbox(A))) == ["4", "5"]
    assert sorted(os.listdir(node.inbox(B))) == ["1", "2", "hole"]
    assert measured.excess(A) == "0.2 MiB in its inbox of 0.1 MiB (rendezvous.owner_bytes)"
    assert measured.excess(B) is None
    measured.measure()
    assert measured.excess(A) is None
    assert node.rejects == {"over_quota": 1}


def test_no_job_of_an_owner_that_has_too_much_is_captured(tmp_path, stack, monkeypatch):
    node = CaptureNode(tmp_path, stack)
    owners = {os.getuid(): "more than 20 files"}
    monkeypatch.setattr(node.service.policy, "_excess", owners.get)
    with pytest.raises(Refused, match="the owner of the job has more than 20 files") as refused:
        node.service.request(MANUAL)
    assert refused.value.reason == "refused_quota"
    owners.clear()
    assert node.service.request(MANUAL).outcome is None


def test_a_pod_has_4096_files_with_the_three_that_the_daemon_made(node):
    node.mount(A)
    measured = Quotas(node.folder, CONFIG, node.reject, node.clock.monotonic)
    for number in range(4094):
        if number == 4093:
            measured.measure()
            assert measured.excess(A) is None
        (node.inbox(A) / f"{number}.json").touch()
    measured.measure()
    assert measured.excess(A) == "more than 4096 files"
    assert len(os.listdir(node.inbox(A))) == 4093
    measured.measure()
    assert measured.excess(A) is None


def test_folders_in_an_inbox_go_first(node, measured):
    fill(node.inbox(A), "old")
    (node.inbox(A) / "a" / "b").mkdir(parents=True)
    fill(node.inbox(A) / "a" / "b", "1", "2", "3", kib=20)
    for _ in range(2):
        measured.measure()
    assert os.listdir(node.inbox(A)) in ([], ["old"])
    assert measured.excess(A) is None


def test_folders_too_deep_to_look_into_are_too_much_also_for_a_round_without_time(
    node, measured, monkeypatch
):
    (node.pod(A) / "ranks" / "1/2/3").mkdir(parents=True)
    measured.measure()
    assert measured.excess(A) is None
    (node.pod(A) / "ranks" / "1/2/3/4").mkdir()
    for look_s in (1.0, -1.0):
        monkeypatch.setattr(quotas, "MEASURE_LIMIT_S", look_s)
        measured.measure()
        assert measured.excess(A) == "folders that cannot be looked into"
    assert node.rejects == {"over_quota": 1}


def test_the_memory_of_the_rendezvous_has_a_share_of_its_own(node, measured):
    for pod, mib in ((A, 64), (B, 63)):
        with (node.pod(pod) / "ranks" / "junk").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, mib << 20)
    measured.measure()
    assert measured.excess(A) == "64.0 MiB in its rendezvous folder of 64.0 MiB"
    assert measured.excess(B) is None
    (node.pod(A) / "ranks" / "junk").unlink()
    measured.measure()
    assert measured.excess(A) is None
    # With the three that the daemon made, one too many.
    for number in range(18):
        (node.pod(A) / "ranks" / str(number)).touch()
    measured.measure()
    assert measured.excess(A) == "more than 20 files"


@only_root
def test_in_the_folders_of_all_each_user_pays_for_their_own_files(node, measured):
    fill(node.folder.inbox, "theirs-1", "theirs-2", "theirs-3", uid=USER)
    fill(node.folder.inbox, "mine")
    measured.measure()
    assert measured.excess(USER) is not None
    assert measured.excess(0) is None
    assert sorted(os.listdir(node.folder.inbox)) == ["mine", "pods", "theirs-2", "theirs-3"]
    # Root has too much now: the inboxes of pods do not go for it.
    fill(node.folder.inbox, "mine-2", "mine-3", after="mine")
    measured.measure()
    assert sorted(os.listdir(node.folder.inbox)) == [
        "mine-2", "mine-3", "pods", "theirs-2", "theirs-3",
    ]  # fmt: skip
    assert sorted(os.listdir(node.folder.inbox / "pods")) == sorted([A, B])


@pytest.fixture
def memory(tmp_path):
    """The rendezvous as a tmpfs of 2 MiB."""
    path = tmp_path / "run"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=755", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def test_rings_in_a_full_rendezvous_lose_nothing_and_that_no_other_fits_is_said_once(
    tmp_path, memory, caplog
):
    node = RankNode(tmp_path)
    measured = Quotas(node.folder, CONFIG, node.reject)
    ring, junk = node.ring(), memory / "junk"
    node.poll()
    for turn in (1, 2):
        measured.measure()
        with pytest.raises(OSError) as full, junk.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 16))
        assert full.value.errno == errno.ENOSPC
        for _ in range(2):
            measured.measure()
            assert node.rejects["no_room"] == turn
        ring.steps_of(5)
        state = node.newest()
        assert (state.steps_total, state.lost_records) == (5 * turn, 0)
        junk.unlink()
    assert caplog.text.count("is full: new ranks cannot report") == 2
    node.close()


@only_root
def test_a_folder_in_which_names_alone_can_be_seen_ends_no_count(open_path):
    """Root without capabilities, as in the chart, reads no more of another user's files."""
    (open_path / "closed").mkdir()
    (open_path / "closed" / "x").touch()
    (open_path / "closed").chmod(0o744)
    for number in range(5):
        (open_path / f"file{number}").touch()
    count = Count("pod")
    os.seteuid(USER)
    try:
        count.add(Directory(open_path), 100)
    finally:
        os.seteuid(0)
    # The folder and the files beside it, in any order of listing.
    assert (count.by_owner["pod"].files, count.by_owner["pod"].is_hidden) == (6, True)


@only_root
def test_a_link_is_its_own_user_s_not_that_of_its_target(tmp_path):
    fill(tmp_path, "theirs", uid=USER)
    folder = tmp_path / "inbox"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path / "theirs")
    for number in range(30):
        (folder / f"{number}").touch()
    for limit, files in ((100, 30), (9, 9)):
        count = Count(None)
        count.add(Directory(folder), limit, without="7")
        assert {owner: usage.files for owner, usage in count.by_owner.items()} == {OWN: files}


DEPTH = 1100
OWN = os.getuid()


@pytest.fixture
def abyss(tmp_path):
    """An inbox with folders in folders, deeper than any stack and any path."""
    folder = tmp_path / "inbox"
    folder.mkdir()
    here = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("a", dir_fd=here)
        below = os.open("a", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    yield folder
    # Pytest could not remove the rest of a sweep.
    subprocess.run(["rm", "-rf", folder], check=True)


def take(folder: Path, uid: int = OWN) -> int:
    return inbox.copy_out(Directory(folder), "a.json", uid, folder / "taken")


def test_a_file_is_moved_out_of_the_inbox_if_the_store_has_space(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_bytes(b"{}")
    with monkeypatch.context() as patch, pytest.raises(OSError) as raised:
        patch.setattr(inbox, "MIN_FREE_BYTES", 1 << 60)
        take(tmp_path)
    assert raised.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert take(tmp_path) == 2
    assert (tmp_path / "taken").read_bytes() == b"{}"
    assert not (tmp_path / "a.json").exists()
    with (tmp_path / "taken").open("rb") as cut, pytest.raises(FetchError, match="became shorter"):
        inbox._copy(cut.fileno(), tmp_path / "again", 3)
    assert not (tmp_path / "again").exists()


HOLES = 1 << 30
TOO_LARGE = 2**33 + 1


@pytest.mark.parametrize(
    ("content", "size", "uid", "said"),
    [
        (b"", HOLES, OWN, "has holes"),
        (b"{" + bytes(99_999), HOLES, OWN, "has holes"),
        (b"", TOO_LARGE, OWN, f"has {TOO_LARGE} bytes, at most {TOO_LARGE - 1}"),
        (None, 2, OWN, "has 2 links"),
        (b"", 0, 4711, f"belongs to uid {OWN}, not 4711"),
    ],
)
def test_a_file_that_may_not_be_believed_is_not_taken(tmp_path, content, size, uid, said):
    (tmp_path / "a.json").write_bytes(content or b"")
    os.truncate(tmp_path / "a.json", size)
    if content is None:
        os.link(tmp_path / "a.json", tmp_path / "b.json")
    with pytest.raises(FetchError, match=rf"a\.json {said}"):
        take(tmp_path, uid)
    assert not (tmp_path / "taken").exists()


def test_what_is_old_is_swept_however_deep_it_lies(tmp_path, abyss):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "kept").touch()
    (abyss / "wide").mkdir()
    (abyss / "wide" / "file").touch()
    (abyss / "wide" / "link").symlink_to(secret)
    (abyss / "link").symlink_to(secret)
    (abyss / "zzz.json").touch()
    made = abyss.stat().st_ctime
    assert inbox.sweep(Directory(abyss), 3600.0, made + 3500, DEADLINE_S) == 0
    inbox.sweep(Directory(abyss), 3600.0, made + 3700, DEADLINE_S)
    assert os.listdir(abyss) == []
    assert os.listdir(secret) == ["kept"]


def test_a_file_that_a_clock_ahead_has_dated_is_swept_too(tmp_path):
    (tmp_path / "a.json").touch()
    made = (tmp_path / "a.json").stat().st_ctime
    assert inbox.sweep(Directory(tmp_path), 3600.0, made - 3500, DEADLINE_S) == 0
    assert inbox.sweep(Directory(tmp_path), 3600.0, made - 3700, DEADLINE_S) == 1


def test_a_sweep_ends_in_time_and_folders_come_last(tmp_path):
    (tmp_path / "folder").mkdir()
    for number in range(100):
        (tmp_path / f"{number}.json").touch()
    now = tmp_path.stat().st_ctime
    # A second passes at each check of the clock.
    for older_than_s, limit_s, swept, checks in ((3600.0, 10.0, 0, 11), (-1.0, 102.0, 100, 103)):
        seconds = itertools.count()
        clock = seconds.__next__
        assert inbox.sweep(Directory(tmp_path), older_than_s, now, limit_s, "", clock) == swept
        assert next(seconds) == checks
    assert os.listdir(tmp_path) == ["folder"]
