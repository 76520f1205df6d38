"""Lines of a telemetry log, as `warpwatch replay` decodes them."""

import contextlib
import json
from pathlib import Path

from tests.fuzz.targets.rings import check_record
from tests.fuzz.watch import Target
from warpwatch_telemetry.log import Decoder, encode
from warpwatch_telemetry.records import Clock, DeviceReading, End, RankEvent, RankSeen, Step

RECORDS = (
    RankSeen(1.0, "llama", 3, 8, "GPU-a"),
    Step(2.0, "llama", 3, 17, 0.5, 0.4, {"comm": 0.1}, 2**34, 32, 65536),
    DeviceReading(3.0, "GPU-a", {("device_clock_hertz", ("sm",)): 1e9}),
    RankEvent(4.0, "llama", 3, "exception", {"exception": "ValueError", "type": "x", "line": 3}),
    Clock(5.0), End(6.0, "llama"),
)  # fmt: skip


def run(data: bytes) -> None:
    decoder = Decoder()
    for line in data.split(b"\n"):
        try:
            record = decoder.decode_line(line)
        except ValueError:
            continue
        check_record(record)
    with contextlib.suppress(ValueError):
        Decoder().decode_lines(data)


def target(folder: Path) -> Target:
    lines = [json.dumps(encode(record)).encode() for record in RECORDS]
    tokens = (b'"type":', b'"step"', b'"metrics":', b"1e999", b"NaN", b"[[[[", b"9" * 30, b"\\ud8")
    return Target(run, [*lines, b"\n".join(lines)], (*tokens, b"{a=b}", b"\\", b"null", b"\n"))
