"""Records to JSON and back."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpwatch.telemetry.log import Decoder, decode, encode, series_key, series_text
from warpwatch.telemetry.records import Clock, DeviceReading, End, RankEvent, RankSeen, Record, Step

RECORDS: list[Record] = [
    RankSeen(1.0, "llama", 3, 8, "GPU-a"),
    Step(2.0, "llama", 3, 17, 0.5, 0.4, {"comm": 0.1}, 2**34, 32, 65536),
    Step(2.0, "llama", 3, 17, 0.5),
    DeviceReading(3.0, "GPU-a", {("device_clock_hertz", ("sm",)): 1e9}),
    DeviceReading(3.0, "GPU-a", {}, up=False, reason="lost"),
    RankEvent(4.0, "llama", 3, "exception", {"exception": "ValueError", "line": 3}),
    Clock(5.0),
    End(6.0, "llama", 3),
    End(6.0, "llama"),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_as_it_was(record: Record) -> None:
    assert decode(json.loads(json.dumps(encode(record)))) == record


def test_what_is_unknown_is_left_out() -> None:
    assert encode(Step(2.0, "a", 0, 1, 0.5)) == {
        "type": "step",
        "time": 2.0,
        "job": "a",
        "rank": 0,
        "step": 1,
        "duration_s": 0.5,
    }
    reading = DeviceReading(3.0, "G", {("device_power_watts", ()): float("nan")})
    assert encode(reading)["metrics"] == {}


def test_device_metrics_are_named_without_their_prefix() -> None:
    assert series_text(("device_power_watts", ())) == "power_watts"
    assert series_text(("device_clock_hertz", ("sm",))) == "clock_hertz{domain=sm}"
    process = ("process_gpu_memory_bytes", ("17", "a,b}\\c=d"))
    text = "process_gpu_memory_bytes{pid=17,process=a\\,b\\}\\\\c=d}"
    assert series_text(process) == text
    assert series_key(text) == process


def test_a_metric_of_a_newer_version_is_kept_as_written() -> None:
    assert series_key("new_ratio{place=a,time=b}") == ("device_new_ratio", ("a", "b"))


@given(st.text(), st.text())
def test_any_label_value_comes_back(pid: str, process: str) -> None:
    key = ("process_gpu_memory_bytes", (pid, process))
    assert series_key(series_text(key)) == key


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"type":"stop","time":1}', "type: 'stop' is none of rank, step, device, event, clock"),
        ('{"time":1}', "type: None is none of"),
        ('{"type":"clock"}', "time: a finite number is needed, not None"),
        ('{"type":"clock","time":NaN}', "time: a finite number is needed, not nan"),
        ('{"type":"clock","time":true}', "time: a finite number is needed, not True"),
        ('{"type":"rank","time":1,"rank":"x"}', "rank: a whole number is needed, not 'x'"),
        ('{"type":"rank","time":1,"job":7}', "job: a text is needed, not 7"),
        ('{"type":"step","time":1,"duration_s":-1}', "duration_s: -1.0 is negative"),
        ('{"type":"step","time":1,"duration_s":1,"phases_s":[]}', "phases_s: an object is needed"),
        ('{"type":"device","time":1,"metrics":{"a{b":1}}', "metrics: 'a{b' is no metric"),
        ('{"type":"device","time":1,"metrics":{"a{b}":1}}', "metrics: 'a{b}' has bad labels"),
        ('{"type":"device","time":1,"metrics":{"a":"1"}}', "a: a finite number is needed"),
        ('{"type":"device","time":1,"up":0}', "up: true or false is needed, not 0"),
        ("[1]", "a JSON object is needed, found list"),
        ('{"type":["step"],"time":1}', "type: ['step'] is none of"),
    ],
)
def test_a_bad_line_is_refused_with_the_field_in_one_line(line: str, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        decode(json.loads(line))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_everything_but_type_and_time_may_be_missing() -> None:
    assert decode({"type": "rank", "time": 1}) == RankSeen(1.0, "", 0)
    assert decode({"type": "step", "time": 1, "duration_s": 2}) == Step(1.0, "", 0, 0, 2.0)
    assert decode({"type": "device", "time": 1}) == DeviceReading(1.0, "", {})
    assert decode({"type": "event", "time": 1}) == RankEvent(1.0, "", 0, "")
    assert decode({"type": "end", "time": 1}) == End(1.0, "")


def test_a_step_without_duration_lasts_since_the_one_before() -> None:
    decoder = Decoder()
    times = [10.0, 10.5, 11.25]
    records = [decoder.decode({"type": "step", "time": at, "job": "a", "rank": 1}) for at in times]
    assert records == [
        RankSeen(10.0, "a", 1),
        Step(10.5, "a", 1, 0, 0.5),
        Step(11.25, "a", 1, 1, 0.75),
    ]
