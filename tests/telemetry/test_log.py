"""Records to JSON and back."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warpwatch_telemetry.bus_messages import name_of, token
from warpwatch_telemetry.catalogue import series_key, series_text
from warpwatch_telemetry.log import Decoder, decode, encode
from warpwatch_telemetry.records import (
    Clock,
    DeviceReading,
    End,
    RankEvent,
    RankSeen,
    Record,
    Serve,
    Step,
)

SECOND = Serve(
    3.0, "chat", 1, 1.01, 0.25, 7, 2, 0.5, 1, 64, 512, 448, 350, {"decode": (40, 0.7)}, 0.1,
    {33: 2}, 0.05, {20: 300}, 2.1, {0: 2}, 0.001, "ns/team", "r1",
)  # fmt: skip
RECORDS: list[Record] = [
    RankSeen(1.0, "llama", 3, 8, "GPU-a"),
    Step(2.0, "llama", 3, 17, 0.5, 0.4, {"comm": 0.1}, 2**34, 32, 65536),
    Step(2.0, "llama", 3, 17, 0.5),
    RankSeen(1.0, "chat", 1, 2, kind="serve", role="scheduler", replica="7f2c"),
    Step(2.0, "chat", 1, 9, 0.02, work_class="mixed", prefill_tokens=512, kv_tokens=9000),
    SECOND,
    DeviceReading(3.0, "GPU-a", {("device_clock_hertz", ("sm",)): 1e9}),
    DeviceReading(3.0, "GPU-a", {}, up=False, reason="lost", driver_load="b/7", slot="0:1a:0"),
    RankEvent(4.0, "llama", 3, "exception", {"exception": "ValueError", "line": 3}),
    RankEvent(4.5, "llama", 3, "exception", {"type": "ValueError", "detail": "of range"}),
    Clock(5.0),
    End(6.0, "llama", 3),
    End(6.0, "llama"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert decode(json.loads(json.dumps(encode(record)))) == record


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.text(), st.text())
def test_any_label_value_and_name_on_the_bus_comes_back(pid: str, process: str) -> None:
    key = ("process_gpu_memory_bytes", (pid, process))
    assert series_key(series_text(key)) == key
    name = f"{process}x"[-50:]
    assert name_of(token(name)) == name


STRANGE = st.none() | st.booleans() | st.integers(-1, 2**63 - 1) | st.floats() | st.text()
CHANGED = st.tuples(st.sampled_from(RECORDS), st.integers(0, 30), STRANGE)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.lists(CHANGED, max_size=5))
def test_a_line_read_by_its_types_is_what_its_object_says(
    lines: list[tuple[Record, int, object]],
) -> None:
    by_line, by_object = Decoder(), Decoder()
    for record, place, strange in lines:
        line = encode(record)
        line[[*line, "step", "metrics", "duration_s"][place % (len(line) + 3)]] = strange
        text = json.dumps(line)
        said = outcome(by_object.decode, json.loads(text))
        assert outcome(by_line.decode_line, text.encode()) == said


def outcome(read: Callable[[Any], Record], line: object) -> Record | str:
    try:
        return read(line)
    except (ValueError, OverflowError) as error:
        return str(error)
