"""The test vectors of docs/protocol.md, read from the document, against the codecs."""

import json
import re
import struct

import pytest

from tests.client.fork_server import ROOT
from warpwatch import protocol

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


def test_the_records_decode_to_what_the_document_says() -> None:
    step = protocol.decode_record(VECTORS["step"].ljust(256, b"\0"))
    assert step[:4] == (18, protocol.RECORD_STEP, 0, 1_700_000_001_000_000_000)
    absent = 2**64 - 1
    words = (17, 512_000_000, absent, absent, 32, 65536, 4_000_000, 100_000_000)
    assert struct.unpack("<8Q", step.payload) == words
    event = protocol.decode_record(VECTORS["event"].ljust(256, b"\0"))
    assert event[:4] == (19, protocol.RECORD_EVENT, 0, 1_700_000_001_000_000_001)
    assert json.loads(event.payload) == {"event": "capture_armed", "id": "c-1", "step": 40}


def test_the_records_of_a_server_decode_to_what_the_document_says() -> None:
    iteration = protocol.decode_record(VECTORS["iteration"].ljust(256, b"\0"))
    assert iteration[:4] == (20, protocol.RECORD_ITERATION, 0, 1_700_000_001_000_000_002)
    absent = 2**64 - 1
    words = (18, 8_000_000, absent, absent, 0, 515, 512, 3, 2048, 1_000_000, 6_000_000)
    assert struct.unpack("<11Q", iteration.payload) == words
    second = protocol.decode_record(VECTORS["second"].ljust(256, b"\0"))
    assert second[:4] == (21, protocol.RECORD_SERVE, 0, 1_700_000_001_000_000_003)
    counts = (3, 1, 500_000_000, 2, 30, 50, 512, 8)
    assert struct.unpack("<13Q", second.payload[:104]) == (
        *(10**9, 250_000_000, *counts),
        *(100_000_000, 200_000_000, 0),
    )
    assert [*struct.iter_unpack("<BBI", second.payload[104:])] == [(0, 3, 2), (1, 20, 8)]


def test_the_command_decodes_to_what_the_document_says() -> None:
    data = VECTORS["command"].ljust(protocol.COMMAND_SIZE, b"\0")
    assert protocol.decode_command(data) == (5, {"op": "cancel", "id": "c-1"})
    with pytest.raises(protocol.ProtocolError, match="not a command file"):
        protocol.decode_command(data[:-1])


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


def test_every_event_of_the_document_is_one_that_the_shim_writes() -> None:
    section = DOCUMENT.split("## Events")[1].split("\n## ")[0]
    reported = set(re.findall(r"^\| `(\w+)` \| .*\| .*\|$", section, re.M))
    source = "".join(path.read_text() for path in (ROOT / "client/warpwatch").rglob("*.py"))
    assert reported - {"event"} == {
        *("capture_armed", "capture_late", "capture_started", "capture_finished"),
        *("capture_failed", "capture_disarmed", "gc_pause", "oom", "exception", "exit", "shutdown"),
    }
    assert all(f'"{name}"' in source for name in reported - {"event"})
