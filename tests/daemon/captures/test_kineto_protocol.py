"""The messages of libkineto: as stock PyTorch sends them, and as no one should."""

from __future__ import annotations

import struct

import pytest

from warpwatch_daemon.captures.kineto import protocol
from warpwatch_daemon.captures.kineto.protocol import MessageError, Poll, TraceConfig

# A poll of PyTorch 2.13: wants 3, six PIDs, no job.
POLL = bytes.fromhex(
    "2800000000000000 726571"
    + 29 * "00"
    + "03000000 06000000 0000000000000000"
    + "b9660000 b8660000 b2660000 b1660000 18540000 17540000"
)


def test_a_poll_of_pytorch_is_read() -> None:
    pids = (26297, 26296, 26290, 26289, 21528, 21527)
    assert protocol.parse(POLL) == Poll(ready=True, job_id=0, pids=pids)


def test_a_process_that_records_is_not_ready() -> None:
    busy = POLL[:40] + b"\1" + POLL[41:]
    parsed = protocol.parse(busy)
    assert isinstance(parsed, Poll)
    assert not parsed.ready


def test_a_registration_is_read_and_answered_with_a_count() -> None:
    asked = protocol.message(b"ctxt", struct.pack("<iiq", 3, 77, 1234))
    assert protocol.parse(asked) is None
    assert protocol.registered(2) == struct.pack("<Q32si", 4, b"ctxt", 2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        POLL[:39],
        POLL[:-1],
        POLL + b"\0",
        POLL[:8] + b"rex" + POLL[11:],
        # A size that is not the payload's.
        struct.pack("<Q", 1 << 63) + POLL[8:],
        protocol.message(b"ctxt", b"\0" * 15),
        protocol.message(b"req", b"\0" * 16),
        protocol.message(b"req", struct.pack("<iiqi", 3, -1, 0, 5)),
        protocol.message(b"req", struct.pack("<iiqi", 3, 1 << 30, 0, 5)),
        protocol.message(b"req", struct.pack("<iiqi", 3, 1, 0, 0)),
        protocol.message(b"req", struct.pack("<iiqi", 3, 1, 0, -5)),
        protocol.message(b"req", struct.pack("<iiq65i", 3, 65, 0, *range(1, 66))),
        b"\xff" * 4096,
    ],
)
def test_what_is_no_message_is_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="bad_message"):
        protocol.parse(data)


def test_an_order_is_written_in_the_words_of_libkineto() -> None:
    order = TraceConfig("/inbox/a.json", 1700000000.1234, 0.25, 1, ("shapes", "stacks", "memory"))
    assert order.text() == (
        "PROFILE_START_TIME=1700000000123\n"
        "ACTIVITIES_LOG_FILE=/inbox/a.json\n"
        "ACTIVITIES_WARMUP_PERIOD_SECS=1\n"
        "ACTIVITIES_DURATION_MSECS=250\n"
        "PROFILE_REPORT_INPUT_SHAPES=true\n"
        "PROFILE_WITH_STACK=true\n"
        "PROFILE_PROFILE_MEMORY=true\n"
    )
    assert protocol.configuration("") == struct.pack("<Q32s", 0, b"req")
