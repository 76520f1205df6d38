"""Every way a file can be no trace ends in one TraceError; old and new formats read alike."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from tests.diagnosis.conftest import Simulations
from tests.diagnosis.traces import ORIGIN_US, STEP_US, TraceFile, cpu_rank
from warpwatch_diagnosis.trace import events, files, reader
from warpwatch_diagnosis.trace.files import TraceError
from warpwatch_diagnosis.trace.reader import Trace, read_trace, take_inventory

CASES = cases(__file__)
GOOD = json.dumps({"traceEvents": cpu_rank(0).events}).encode()
STEP = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "tid": 1, "pid": 1}


def timed(*times: tuple[Any, Any]) -> bytes:
    return json.dumps([STEP | {"ts": ts, "dur": dur} for ts, dur in times]).encode()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        *((text.encode(), said) for text, said in CASES["refused"]),
        (b"\x89PNG\r\n\x1a\n", "is not JSON"),
        (GOOD[:-40], "is cut short"),
        (gzip.compress(GOOD, mtime=0)[:-40], "is cut short"),
        (b"\x1f\x8b" + b"x" * 50, "damaged gzip"),
        (b'{"traceEvents": [' + b"[" * 100_000, "nested too deeply"),
        (GOOD + GOOD, "is not JSON"),
        *((timed(times), "usable time") for times in ((0, 1), (5, -1), ("5", 1), (1e300, 1))),
        (timed((5, 1), (1.7e15, 1)), "broken clock"),
    ],
)
def test_what_is_no_trace_is_refused_in_one_line(tmp_path, content, said):
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(TraceError, match="No such file"):
        read_trace(tmp_path / "absent.json")
    with pytest.raises(TraceError, match="directory"):
        read_trace(tmp_path)


def test_too_many_bytes_or_events_are_refused_at_the_limit(tmp_path, monkeypatch):
    path = cpu_rank(0).write(tmp_path / "many.json")
    count, size = read_trace(path).count, path.stat().st_size
    assert read_trace(path, size, count).count == count
    with pytest.raises(TraceError, match=f"more than {size - 1:,} bytes decompressed"):
        read_trace(path, max_bytes=size - 1)
    with pytest.raises(TraceError, match=f"more than {count - 1} events"):
        read_trace(path, max_events=count - 1)
    monkeypatch.setattr(reader, "MAX_ELEMENTS", count - 1)
    with pytest.raises(TraceError, match=f"more than {count - 1} elements"):
        read_trace(path)


HUGE = {"distributedInfo": {"rank": 10**400}, "warpwatch": {"rank": 2**63}}


@pytest.mark.parametrize(("name", "head", "rank"), [*CASES["ranks"], ("a.json", HUGE, None)])
def test_the_rank_is_in_the_metadata_or_the_name(tmp_path, name, head, rank):
    assert read_trace(TraceFile(**head).write(tmp_path / name)).rank == rank


FULL = {"ph": "X", "name": "a", "pid": 1, "tid": 2, "ts": 5, "dur": 1}


def read_elements(tmp_path: Path, *elements: Any) -> Trace:
    path = tmp_path / "elements.json"
    path.write_text(json.dumps({"traceEvents": elements}))
    return read_trace(path)


def test_each_category_of_old_and_new_traces_has_its_kind(tmp_path):
    names = {kind: text.split() for kind, text in CASES["categories"].items()}
    other = ["ac2g", "cuda_sync", "gpu_user_annotation", "overhead", "new", None, 5]
    categories = [*(name for kept in names.values() for name in kept), *other]
    events = [FULL | {"cat": category, "name": str(category)} for category in categories]
    # Older profilers record their marks as operators.
    marks = ["Optimizer.step#SGD.step", "DistributedDataParallel.forward"]
    events += [
        FULL | {"cat": c, "name": n} for c, n in zip(("cpu_op", "Operator"), marks, strict=True)
    ]
    names["annotation"] += marks
    read = read_elements(tmp_path, *events).events
    assert {kind: [e.name for e in kept] for kind, kept in read.items() if kept} == names


def test_changes_of_memory_are_read_with_and_without_their_category(tmp_path):
    old = {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 2, "ts": 5}
    old["args"] = {"Device Type": 1, "Device Id": 0, "Bytes": 512, "Addr": 7}
    new = old | {"cat": "cpu_instant_event", "args": {"Bytes": -512, "Total Allocated": 10**20}}
    found = read_elements(tmp_path, old, new, old | {"name": "other"}).events["memory"]
    assert [e.arguments for e in found] == [
        {"Device Type": 1, "Device Id": 0, "Bytes": 512},
        {"Bytes": -512},
    ]


@pytest.mark.parametrize("huge", [2**63, 10**400, -(10**400), 1.7e308])
def test_numbers_beyond_64_bits_are_dropped(tmp_path, huge):
    given = {"blocks per SM": huge, "bytes": huge, "In msg nelems": huge, "dtype": "Float"}
    read = read_elements(tmp_path, FULL | {"cat": "kernel", "args": given}).events["kernel"]
    assert read[0].arguments == {"dtype": "Float"}


def test_what_is_no_correlation_joins_nothing(tmp_path):
    given = [0, -1, True, "7", 7.0, None, 1 << 64, 7]
    elements = [FULL | {"cat": "kernel", "args": {"correlation": one}} for one in given]
    read = read_elements(tmp_path, *elements).events["kernel"]
    assert [e.correlation for e in read] == [None] * 7 + [7]


def test_equal_arguments_are_one_object_and_different_ones_are_not(tmp_path):
    given = [{"Input Dims": [[2, 3]], "Ev Idx": 1}, {"Input Dims": [[2, 3]], "Ev Idx": 2}]
    given += [{"Input Dims": [[2, 4]]}, {"Ev Idx": 4}]
    made = ("[False, True, False]", "[True, False, True]", "[True, True, False]")
    given += [{"Concrete Inputs": ["", gradients]} for gradients in made]
    read = read_elements(tmp_path, *(FULL | {"cat": "cpu_op", "args": args} for args in given))
    first, second, third, none, *backward = (e.arguments for e in read.events["operator"])
    assert first == {"Input Dims": [[2, 3]]} and third == {"Input Dims": [[2, 4]]}
    assert first is second and none is None
    # A backward call that makes the gradient of input or weight alone.
    assert backward == [{"One gradient": True}] * 2 + [None]


def test_times_keep_their_nanoseconds(tmp_path):
    event = FULL | {"cat": "kernel", "ts": 4458676522690.655, "dur": 156.777}
    read = read_elements(tmp_path, event).events["kernel"][0]
    assert (read.begin_us, round(read.end_us - read.begin_us, 3)) == (4458676522690.655, 156.777)


def test_of_python_frames_those_are_kept_that_say_something(tmp_path):
    kept, dropped = CASES["kept"], CASES["dropped"]
    frames = [FULL | {"cat": "python_function", "name": name} for name in kept + dropped]
    assert [e.name for e in read_elements(tmp_path, *frames).events["python"]] == kept


def test_frames_and_arguments_have_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MAX_FRAMES", 2)
    monkeypatch.setattr(events, "MAX_ARGUMENTS_BYTES", 100)
    frames = [FULL | {"cat": "python_function"}] * 3
    stacks = ["a" * 500, "b", "a" * 500]
    calls = [FULL | {"cat": "cpu_op", "args": {"Call stack": stack}} for stack in stacks]
    read = read_elements(tmp_path, *frames, *calls).events
    assert len(read["python"]) == 2
    kept = [e.arguments and e.arguments["Call stack"] for e in read["operator"]]
    assert kept == [stacks[0], None, stacks[2]]


def test_too_many_names_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(events, "MAX_NAMES_BYTES", 10_000)
    named = [FULL | {"cat": "cpu_op", "name": f"a{number}"} for number in range(100)]
    threads = [FULL | {"cat": "cpu_op", "tid": number} for number in range(100)]
    for many in (named, threads):
        with pytest.raises(TraceError, match="different names and threads"):
            read_elements(tmp_path, *many)
    assert read_elements(tmp_path, *named[:40]).count == 40


def test_a_name_of_a_megabyte_is_cut(tmp_path):
    named = [FULL | {"cat": "kernel", "name": "k" * 1_000_000 + end} for end in ("a", "b")]
    assert [len(e.name) for e in read_elements(tmp_path, *named).events["kernel"]] == [2_000] * 2


# --- what a small file can cost its reader --------------------------------------------------

EVENT = '{"ph":"X","cat":"cpu_op","name":"aten::mm","ts":5,"dur":1}'


def test_a_small_file_that_grows_too_much_is_refused(tmp_path):
    path = tmp_path / "trace.json.gz"
    path.write_bytes(gzip.compress(f"[{EVENT}".encode() + b" " * 2**25))
    limit = 2**23 + 200 * path.stat().st_size
    with pytest.raises(TraceError, match=f"more than {limit:,} bytes decompressed"):
        read_trace(path)


def test_other_values_are_read_up_to_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_SINGLE_VALUES", 100)
    path = tmp_path / "odd.json"
    path.write_text(f"[{'0,' * 99}{EVENT},]\n \n")
    assert read_trace(path).count == 1
    path.write_text(f"[{'0,' * 101}{EVENT}]")
    with pytest.raises(TraceError, match="more than 100 values that are not events"):
        read_trace(path)
    monkeypatch.setattr(files, "MAX_VALUE_CHARS", 100)
    path.write_text(f'{{"a": "{"x" * files.CHUNK_BYTES}"}}')
    with pytest.raises(TraceError, match="is not JSON"):
        read_trace(path)


@pytest.mark.parametrize("unit", ['"},",', '{"a":"},{"},', "[],", '{"b":1},'])
def test_no_text_is_decoded_again_and_again(unit):
    """A border between two events may be guessed wrongly, but once for all text before it."""
    text = "[" + unit * 5000 + EVENT + "]"
    decoded = []

    def decode(part: str) -> Any:
        decoded.append(len(part))
        return files.decode_json(part)

    stream = files.JsonStream(io.BytesIO(text.encode()).read, decode)
    found = [element for _, several in stream.members("traceEvents") for element in several]
    assert found == json.loads(text)
    assert sum(decoded) < 2 * len(text)


# --- the inventory counts the events that the diagnosis reads ----------------------------------

FIXTURES = Path(__file__).parents[1] / "fixtures"
RECORDED = FIXTURES / "ranks" / "healthy-perceptron.rank1.pt.trace.json.gz"


def test_events_without_a_time_are_counted_apart_and_steps_with_theirs(tmp_path: Path) -> None:
    trace = TraceFile(steps=2, warpwatch={"rank": 3}, deviceProperties=[{"id": 0}])
    trace.operator(100, 50)
    trace.events += [
        trace.events[-1] | {"ts": 0},
        trace.events[-1] | {"ts": "5"},
        trace.events[-1] | {"dur": -1},
        {"ph": "s", "cat": "ac2g", "ts": 1},
        {"ph": "X", "cat": "new", "ts": 1, "dur": 1},
    ]
    found = take_inventory(trace.write(tmp_path / "trace.json.gz"))
    assert (found.listed, found.untimed, found.rank, found.sees_gpu) == (8, 3, 3, True)
    assert found.counts == {"annotation": 2, "operator": 1}
    assert found.steps == {
        3: (ORIGIN_US, ORIGIN_US + STEP_US),
        4: (ORIGIN_US + STEP_US, ORIGIN_US + 2 * STEP_US),
    }
    assert (found.begin_us, found.end_us) == (ORIGIN_US, ORIGIN_US + 2 * STEP_US)


@pytest.mark.parametrize("on_gpu", [True, False])
def test_counts_are_those_that_diagnosis_reads(simulations: Simulations, on_gpu: bool) -> None:
    path = simulations.paths("transfer_bound")[0] if on_gpu else RECORDED
    found, events = take_inventory(path), read_trace(path).events
    assert found.counts == {kind: len(kept) for kind, kept in events.items() if kept}
    annotated = [e for e in events["annotation"] if e.name.startswith("ProfilerStep#")]
    steps = {int(e.name.partition("#")[2]): (e.begin_us, e.end_us) for e in annotated}
    assert found.steps == steps
    assert found.begin_us == min(e.begin_us for kept in events.values() for e in kept)
    assert found.end_us == max(e.end_us for kept in events.values() for e in kept)
    assert (found.sees_gpu, found.untimed, found.rank) == (on_gpu, 0, None if on_gpu else 1)
    assert found.listed == sum(found.counts.values())
