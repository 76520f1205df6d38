"""The history of anomalies and the minutes around them: what is kept, and what a bad disk costs."""

import sqlite3
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.manual_clock import ManualClock
from warpwatch_daemon.config import Config
from warpwatch_daemon.history import archive
from warpwatch_daemon.history.archive import ASIDE, FILE, Archive, HistoryStore
from warpwatch_daemon.history.context import Context
from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.anomalies.register import Change
from warpwatch_detection.engine import Detection
from warpwatch_runtime.loading import parse
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext, ContextSeries
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import Clock, DeviceReading, RankEvent, Step

NOW = 1_700_000_000.0
HANG = Anomaly(
    id="a1", kind="hang", time=NOW, severity="critical", summary="no step", job="llama", rank=1
)
OVER = replace(HANG, end_time=NOW + 60)
CONTEXT = AnomalyContext(
    10.0, (ContextSeries((NOW, NOW + 10), (5, 6), {"step_duration_s": (2.0, None)}, job="llama"),)
)


def store(folder: Path, age_s: float = 1e9) -> tuple[HistoryStore, list[str]]:
    failures: list[str] = []
    return HistoryStore(folder, age_s, failures.append), failures


def test_the_next_daemon_finds_the_last_word_and_the_first_context(tmp_path):
    first, failures = store(tmp_path)
    first.write([(HANG, CONTEXT)], NOW)
    first.write([(replace(HANG, id="cut off", time=NOW + 1), None)], NOW + 30)
    first.write([(OVER, None)], NOW + 60)
    first.close()
    second, _ = store(tmp_path)
    # An anomaly without an end gets its last write time.
    assert [(one.id, one.end_time) for one in second.newest(10)] == [
        ("a1", NOW + 60), ("cut off", NOW + 30),
    ]  # fmt: skip
    assert second.find("a1") == (OVER, CONTEXT)
    assert second.find("a2") is None
    assert failures == []


def test_rows_and_age_are_bounded_and_the_newest_come_oldest_first(tmp_path, monkeypatch):
    monkeypatch.setattr("warpwatch_daemon.history.archive.MAX_ROWS", 5)
    history, _ = store(tmp_path, age_s=100)
    for number in (*range(18), 19, 18):
        history.write([(replace(OVER, id=str(number), time=NOW + number), CONTEXT)], NOW)
    assert [one.id for one in history.newest(100)] == ["15", "16", "17", "18", "19"]
    assert [one.id for one in history.newest(2)] == ["18", "19"]
    new, lasting = replace(OVER, id="new", time=NOW + 116.5), replace(OVER, id="lasting", time=NOW)
    history.write([(new, None), (lasting, None)], NOW + 116.5)
    assert [one.id for one in history.newest(100)] == ["lasting", "17", "18", "19", "new"]


def test_a_file_that_is_no_database_is_moved_aside_with_one_line(tmp_path, caplog):
    (tmp_path / FILE).write_bytes(b"this is no database, it is a sentence " * 100)
    history, failures = store(tmp_path)
    for _ in range(2):
        history.write([(OVER, None)], NOW)
    assert history.newest(10) == [OVER]
    assert (tmp_path / ASIDE).read_bytes().startswith(b"this is no database")
    (line,) = caplog.messages
    assert str(tmp_path / ASIDE) in line
    assert failures == []


@pytest.mark.parametrize("movable", [True, False])
def test_a_database_that_breaks_while_in_use_costs_the_history_and_nothing_else(
    tmp_path, caplog, movable
):
    history, failures = store(tmp_path)
    history.write([(OVER, CONTEXT)], NOW)
    history.close()
    path = tmp_path / FILE
    path.write_bytes(path.read_bytes()[:100].ljust(path.stat().st_size, b"\xff"))
    if not movable:
        (tmp_path / ASIDE / "in the way").mkdir(parents=True)
    assert history.newest(10) == []
    assert history.write([(OVER, None)], NOW) is movable
    assert history.newest(10) == [OVER] * movable
    assert failures == ([] if movable else ["read", "write", "read"])
    assert caplog.records != []


def test_a_database_of_another_version_is_left_alone(tmp_path, caplog):
    with closing(sqlite3.connect(tmp_path / FILE)) as connection:
        connection.execute("PRAGMA user_version = 2")
    before = (tmp_path / FILE).read_bytes()
    history, failures = store(tmp_path)
    assert history.write([(OVER, None)], NOW) is False
    assert history.newest(10) == []
    assert (tmp_path / FILE).read_bytes() == before
    assert not (tmp_path / ASIDE).exists()
    assert failures == ["write", "read"]
    assert len(caplog.records) == 1
    assert caplog.text.rstrip().endswith("it was written by another version")


def test_a_full_disk_is_counted_each_time_and_logged_once(tmp_path, caplog):
    history, failures = store(tmp_path)
    history.write([(OVER, None)], NOW)
    # As small as the file is now: SQLite answers as on a full disk.
    connection = history._connection
    pages = connection.execute("PRAGMA page_count").fetchone()[0]
    connection.execute(f"PRAGMA max_page_count = {pages}")
    large = replace(OVER, id="large", summary="x" * 100_000)
    history.write([(large, None)], NOW)
    assert failures == ["write"]
    assert len(caplog.records) == 1
    assert "full" in caplog.text
    assert connection is not history._connection
    history.write([(large, None)], NOW)
    assert [one.id for one in history.newest(10)] == ["a1", "large"]
    assert history.complaint.text == ""


def test_a_row_of_another_form_is_passed_over(tmp_path):
    history, failures = store(tmp_path)
    history.write([(OVER, CONTEXT)], NOW)
    history.close()
    with closing(sqlite3.connect(tmp_path / FILE)) as connection, connection:
        connection.execute("INSERT INTO anomalies VALUES ('x', 1e9, 1e9, 1, x'93', x'0102')")
        connection.execute("UPDATE anomalies SET context = x'0102' WHERE id = 'a1'")
    assert history.newest(10) == [OVER]
    assert history.find("a1") == (OVER, None)
    assert history.find("x") is None
    assert failures == []
    # Nor is a context that unpacks to more than two MiB.
    huge = ContextSeries((NOW,), (1,), {f"phase {n}": (1.0,) for n in range(150_000)}, job="llama")
    history.write([(OVER, AnomalyContext(10.0, (huge,)))], NOW)
    assert history.find("a1") == (OVER, None)


def step(rank: int, at: float, duration_s: float, **changes: Any) -> Step:
    phases = {"forward": duration_s / 2, "comm": duration_s / 4}
    fields: dict[str, Any] = {"phases_s": phases, "tokens": 100, **changes}
    return Step(NOW + at, "llama", rank, int(at), duration_s, **fields)


def test_points_of_ten_seconds_are_of_the_rank_its_job_and_the_gauges_of_its_device(golden):
    context = Context()
    for at in range(30):
        context.observe(step(0, at, 1.0))
        context.observe(step(1, at, 2.0, memory_allocated_bytes=1000 - at))
    for at in range(20):
        metrics: dict[SeriesKey, float] = {("device_power_watts", ()): 400.0 + at % 10}
        if at < 10:
            metrics["device_clock_hertz", ("sm",)] = 1.98e9
        context.observe(DeviceReading(NOW + at, "GPU-1", metrics))
    of_rank = context.around(replace(HANG, time=NOW + 30))
    of_device = context.around(replace(HANG, job=None, rank=None, device="GPU-1"))
    found = msgspec.json.encode([of_rank, of_device])
    golden("history/contexts.json", msgspec.json.format(found))


def test_ten_minutes_before_and_five_after_are_kept_however_long_it_goes_on():
    context = Context()
    # First an hour of a clock that is then set back.
    for at in (*range(9000, 12600, 2), *range(0, 4700, 2), *range(4800, 5300, 2)):
        context.observe(step(1, at, 2.0))
    found = context.around(replace(HANG, time=NOW + 4900)).series
    # A gap in the steps is a gap in the times.
    expected = [*range(4290, 4700, 10), *range(4800, 5210, 10)]
    assert [[time - NOW for time in series.times] for series in found] == [expected] * 2
    assert "memory_allocated_bytes" not in found[0].values
    assert context.around(replace(HANG, time=NOW + 9000)).series == ()
    assert {len(one.points) for one in (*context._jobs.values(), *context._ranks.values())} == {100}


def test_phases_and_ranks_that_nobody_can_count_are_bounded(monkeypatch):
    monkeypatch.setattr("warpwatch_daemon.history.context.MAX_RANKS", 2)
    context = Context()
    for number in range(100):
        context.observe(step(1, number, 1.0, phases_s={f"phase {number}": 1.0}))
    names = [name for name in context.around(HANG).series[0].values if name.startswith("phase_s")]
    assert len(names) == 12
    # The rank that was silent for longest gives way.
    for rank, at in ((2, 0), (3, 100)):
        context.observe(step(rank, at, 1.0))
    kept = [rank for rank in (1, 2, 3) if len(context.around(replace(HANG, rank=rank)).series) > 1]
    assert kept == [1, 3]


def test_so_many_ranks_jobs_and_devices_have_minutes():
    context = Context()
    for number in range(1100):
        context.observe(step(number, 0, 1.0, run=f"r{number}"))
        context.observe(DeviceReading(NOW, f"GPU-{number}", {("device_power_watts", ()): 1.0}))
    found = {"ranks": 0, "jobs": 0, "devices": 0}
    for number in range(1100):
        own = context.around(replace(HANG, run=f"r{number}", rank=number, device=f"GPU-{number}"))
        for one in own.series:
            found["devices" if one.device else "jobs" if one.rank is None else "ranks"] += 1
    assert found == {"ranks": 1024, "jobs": 256, "devices": 512}


class Node:
    def __init__(self, folder: Path, **detectors: Any) -> None:
        self.failures: list[str] = []
        sections = {"anomalies": {"reopen_s": 0}, "detection": detectors}
        config = parse(Config, sections, "test")
        self.clock = ManualClock(wall=NOW)
        self.detection = Detection(config.detection, config.anomalies)
        self.is_woken = threading.Event()
        self.archive = Archive(
            folder,
            self.detection,
            self.failures.append,
            self.is_woken.set,
            monotonic=self.clock.monotonic,
            wall=self.clock.wall,
        )

    def feed(self, *records: Step | RankEvent | Clock) -> list[Anomaly]:
        changes = []
        for record in records:
            self.archive.observe(record)
            for change in self.detection.feed(record):
                self.archive.note_change(change)
                changes.append(change.anomaly)
        self.archive.write()
        return changes

    def round(self, after_s: float) -> None:
        self.clock.advance(after_s)
        self.is_woken.clear()
        self.archive.advance(self.clock.wall())
        if self.is_woken.is_set():
            self.archive.write()


def crash_in_training(node: Node) -> Anomaly:
    node.feed(*(step(rank, at, 1.0) for at in range(60) for rank in (0, 1)))
    (crash,) = node.feed(RankEvent(NOW + 60, "llama", 1, "exception", {"type": "ValueError"}))
    return crash


def test_an_anomaly_and_its_minutes_are_stored_when_it_opens(tmp_path):
    node = Node(tmp_path)
    crash = crash_in_training(node)
    anomaly, context = node.archive.find(crash.id) or (None, None)
    assert (anomaly.kind, anomaly.rank) == ("crash", 1)
    assert [series.rank for series in context.series] == [None, 1]
    assert node.archive.contexts()[crash.id] == context
    assert node.failures == []
    store(tmp_path)[0].write([(replace(OVER, id="before"), None)], NOW)
    # A daemon that was killed now leaves at least this history.
    second = Node(tmp_path)
    second.archive.restore(NOW + 70)
    assert second.detection.active == ()
    before, known = second.detection.history
    assert before.id == "before"
    assert (known.id, known.end_time) == (crash.id, NOW + 60)
    # If it goes on, its minutes stay.
    second.archive.note_change(Change("reopened", known))
    assert second.archive.contexts()[crash.id] == context
    third = Node(tmp_path)
    third.archive.note_change(Change("closed", known))
    third.archive.write()
    assert third.archive.find(crash.id) == (known, context)


def test_the_minutes_after_an_anomaly_are_added_every_ten_seconds_and_then_kept(tmp_path):
    node = Node(tmp_path)
    crash = crash_in_training(node)

    def last_point(after_s: float, at: float) -> float:
        node.archive.observe(step(0, at, 1.0))
        node.round(after_s)
        return node.archive.contexts()[crash.id].series[0].times[-1] - NOW

    assert last_point(9.5, 70) == 50
    assert last_point(0.5, 80) == 80
    assert last_point(361, 300) == 300
    # Its five minutes are over, and the store has them.
    assert last_point(10, 350) == 300
    stored = node.archive.find(crash.id)
    assert stored is not None
    assert stored[1] == node.archive.contexts()[crash.id]


def test_what_detectors_know_is_saved_every_ten_seconds_and_soon_after_an_anomaly(tmp_path):
    node, state = Node(tmp_path), Path(tmp_path, "detectors.state")

    def saved(after_s: float) -> bool:
        state.unlink(missing_ok=True)
        node.round(after_s)
        return state.exists()

    assert [saved(after_s) for after_s in (9.5, 0.5, 0.5)] == [False, True, False]
    crash_in_training(node)
    assert [saved(after_s) for after_s in (0.25, 0.25, 9.5, 0.5)] == [False, True, False, True]


def test_the_next_daemon_goes_on_with_it_and_its_minutes(tmp_path):
    first = Node(tmp_path)
    crash = crash_in_training(first)
    first.archive.finish()
    second = Node(tmp_path)
    second.archive.restore(NOW + 70)
    assert (second.detection.active, [*second.detection.history]) == ((crash,), [])
    second.archive.observe(step(0, 300, 1.0))
    closed = second.feed(Clock(NOW + 1000))
    assert second.archive.contexts() == first.archive.contexts()
    assert second.archive.contexts()[crash.id].series[0].times[0] == NOW
    assert [(one.id, one.end_time) for one in closed] == [(crash.id, NOW + 660)]
    second.archive.finish()
    third = Node(tmp_path)
    third.archive.restore(NOW + 1100)
    assert third.detection.active == ()
    assert [one.id for one in third.detection.history] == [crash.id]


def test_what_a_restart_ends_keeps_its_minutes(tmp_path):
    first = Node(tmp_path)
    first.feed(*(step(rank, at, 1.0) for at in range(400) for rank in range(4)))
    hung = first.feed(Clock(NOW + 2000))
    assert [one.kind for one in hung] == ["hang"]
    first.archive.finish()
    second = Node(tmp_path)
    # Its state has another form since.
    second.archive.parts["hang"].state_version = 9
    second.archive.restore(NOW + 2010)
    second.archive.write()
    assert second.detection.active == ()
    assert [one.id for one in second.detection.history] == [hung[0].id]
    found, context = second.archive.find(hung[0].id) or (None, None)
    assert found.summary.endswith("judged from the start since the daemon was restarted")
    assert len(context.series) >= 1


def test_a_memory_that_cannot_be_read_is_told_in_one_line(tmp_path, caplog):
    first = Node(tmp_path)
    crash_in_training(first)
    first.archive.finish()
    path = tmp_path / "detectors.state"
    path.write_bytes(path.read_bytes()[:-20])
    Node(tmp_path).archive.restore(NOW + 70)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(path) in caplog.text


def test_a_part_that_cannot_say_what_it_remembers_is_left_out(tmp_path):
    class Broken:
        @property
        def state(self) -> Any:
            raise ZeroDivisionError("a detector's mistake")

    broken: Any = Broken()
    parts = Node(tmp_path).detection.parts()
    body = snapshot.save({**parts, "hang": broken})
    saved = msgspec.msgpack.decode(body, type=snapshot.Snapshot)
    assert parts.keys() - saved.parts.keys() == {"hang"}


def test_a_store_that_cannot_be_written_costs_no_anomaly(tmp_path, caplog):
    folder = tmp_path / "missing"
    node = Node(folder)
    crash = crash_in_training(node)
    node.archive.finish()
    node.archive.finish()
    assert [one.kind for one in node.detection.active] == ["crash"]
    # Each failure is counted, and logged once.
    assert [node.failures.count(what) for what in ("write", "snapshot")] == [3, 2]
    assert len(caplog.records) == len([*node.archive.problems()]) == 2
    folder.mkdir()
    node.archive.finish()
    assert [*node.archive.problems()] == []
    assert node.archive.find(crash.id) is not None


def test_a_memory_that_is_too_large_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "MAX_STATE_BYTES", 10)
    node = Node(tmp_path)
    node.archive.finish()
    assert node.failures == ["snapshot"]
    assert not (tmp_path / "detectors.state").exists()


def test_what_could_not_be_written_is_written_when_the_database_is_free_again(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("warpwatch_daemon.history.archive.BUSY_TIMEOUT_S", 0.01)
    node = Node(tmp_path)
    HistoryStore(tmp_path, 1e9, node.failures.append).write([(OVER, None)], NOW)
    with closing(sqlite3.connect(tmp_path / FILE, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        crash = crash_in_training(node)
        assert node.failures == ["write"] * len(node.failures) != []
        other.execute("ROLLBACK")
    monkeypatch.undo()
    assert node.archive.find(crash.id) is None
    (over,) = (one for one in node.feed(Clock(NOW + 1000)) if one.id == crash.id)
    found, context = node.archive.find(crash.id) or (None, None)
    assert found == over
    assert context is not None


def test_what_waits_for_a_database_is_bounded(tmp_path):
    node = Node(tmp_path / "missing")
    # An anomaly that changes again is not the oldest any more.
    for count, number in enumerate((*range(2000), 1, *range(2000, 2003), 5, *range(2003, 2007))):
        node.archive.note_change(Change("closed", replace(OVER, id=str(number))))
        if count > 2000:
            node.archive.write()
    (tmp_path / "missing").mkdir()
    node.archive.write()
    kept = [ident for ident in map(str, range(2007)) if node.archive.find(ident)]
    assert kept == [str(number) for number in (1, 5, *range(9, 2007))]
    assert node.failures.count("queue") == 7
