"""The test vectors of docs/protocol.md, read from the document, against the codecs."""

import json
import re
import struct
from typing import Any, cast

import pytest

from tests.cases import cases
from tests.client.fork_server import ROOT
from warpwatch import protocol

CASES = cases(__file__)
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text()
VECTORS = {
    name: bytes.fromhex(text)
    for name, text in re.findall(r"^```vector (\w+)\n([0-9a-f\s]+)```$", DOCUMENT, re.MULTILINE)
}


def ring() -> bytearray:
    data = bytearray(protocol.RING_SIZE)
    data[:64] = VECTORS["identity"]
    data[320 : 320 + 180] = VECTORS["totals"]
    data[512 : 512 + len(VECTORS["metadata"])] = VECTORS["metadata"]
    data[64:112] = VECTORS["words"]
    return data


def test_all_vectors_are_there() -> None:
    assert set(VECTORS) == {
        *("identity", "words", "totals", "metadata"),
        *("step", "event", "iteration", "second", "command"),
    }


def test_the_header_decodes_to_what_the_document_says() -> None:
    header = protocol.decode_header(bytes(ring()), protocol.RING_SIZE)
    assert header.identity == (
        *(4242, bytes(range(16)), 123456),
        *(1_700_000_000_000_000_000, 5_000_000_000, 2048),
    )
    assert header.totals[:6] == (7, 100, 99, 3200, 409600, 51_200_000_000)
    assert header.totals.phases_ns == (400_000_000, 20_000_000_000, *[0] * 14)
    assert json.loads(header.metadata_text or b"") == {"job": "llama", "rank": 3}
    assert (header.heartbeat_ns, header.step_begun_ns) == (6_000_000_000, 5_900_000_000)
    assert (header.records, header.ended, header.step_begun, header.calls) == (19, False, 100, 300)


@pytest.mark.parametrize(("name", "expected"), CASES["records"].items())
def test_a_record_decodes_to_what_the_document_says(name: str, expected: list[Any]) -> None:
    record = protocol.decode_record(VECTORS[name].ljust(256, b"\0"))
    *head, layout, payload = expected
    assert list(record[:4]) == head
    words = struct.unpack_from(layout, record.payload)
    assert list(words) == payload if layout[-1] == "Q" else json.loads(words[0]) == payload
    buckets = record.payload[struct.calcsize(layout) :]
    assert [*struct.iter_unpack("<BBI", buckets)] == [(0, 3, 2), (1, 20, 8)][: len(buckets)]


def test_the_command_decodes_to_what_the_document_says() -> None:
    data = VECTORS["command"].ljust(protocol.COMMAND_SIZE, b"\0")
    assert protocol.decode_command(data) == (5, {"op": "cancel", "id": "c-1"})
    other, a_list = data.replace(b"WWCMD", b"WWCME"), protocol.encode_command(5, cast("Any", []))
    for damaged in (data[:-1], other, data.replace(b"c-1", b"c-2"), a_list):
        with pytest.raises(protocol.ProtocolError):
            protocol.decode_command(damaged)
    fits = {"id": "x" * (protocol.COMMAND_MAX_TEXT - 9)}
    assert protocol.decode_command(protocol.encode_command(6, fits)) == (6, fits)
    for encode in (protocol.encode_command, protocol.encode_metadata):
        with pytest.raises(protocol.ProtocolError, match="bytes"):
            encode(5, {"id": fits["id"] + "x"})


@pytest.mark.parametrize("damage", CASES["headers"].values(), ids=CASES["headers"])
def test_a_header_of_another_form_is_refused_with_a_reason(damage: list[Any]) -> None:
    offset, text, size, reason = damage
    data = ring()
    data[offset : offset + len(text) // 2] = bytes.fromhex(text)
    with pytest.raises(protocol.ProtocolError) as refused:
        protocol.decode_header(bytes(data[: min(size, 4096)]), size)
    assert refused.value.reason == reason


@pytest.mark.parametrize("name", ["step", "event", "iteration", "second"])
def test_a_flipped_bit_is_noticed(name: str) -> None:
    for position in range(len(VECTORS[name])):
        data = bytearray(VECTORS[name].ljust(256, b"\0"))
        data[position] ^= 0x10
        with pytest.raises(protocol.ProtocolError):
            protocol.decode_record(bytes(data))


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (protocol.TOTALS_OFFSETS[0], protocol.TOTALS.size + 4),
        (protocol.META_OFFSETS[0], protocol.META_SLOT_SIZE),
    ],
)
def test_offsets_are_those_of_the_document(offset: int, size: int) -> None:
    assert re.search(rf"^\| {offset}, \d+ \| {size} \|", DOCUMENT, re.MULTILINE)
    assert offset % 8 == 0
    assert [protocol.record_offset(sequence) for sequence in (1, 2048, 2049)] == [
        *(4096, 4096 + 2047 * 256, 4096)
    ]


def test_every_event_of_the_document_is_one_that_the_shim_writes() -> None:
    section = DOCUMENT.split("## Events")[1].split("\n## ")[0]
    reported = set(re.findall(r"^\| `(\w+)` \| .*\| .*\|$", section, re.M))
    source = "".join(path.read_text() for path in (ROOT / "client/warpwatch").rglob("*.py"))
    assert reported - {"event"} == {
        *("capture_armed", "capture_late", "capture_started", "capture_finished"),
        *("capture_failed", "capture_disarmed", "gc_pause", "oom", "exception", "exit", "shutdown"),
    }
    assert all(f'"{name}"' in source for name in reported - {"event"})
