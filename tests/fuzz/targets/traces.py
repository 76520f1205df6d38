"""Trace files of any bytes, plain or packed by gzip, in pieces of any size."""

import gzip
import json
from pathlib import Path

from tests.diagnosis.traces import TraceFile, cpu_rank
from tests.fuzz.watch import Target
from warpwatch_diagnosis.trace import files
from warpwatch_diagnosis.trace.files import TraceError
from warpwatch_diagnosis.trace.reader import read_trace

PACKED = 128


def target(folder: Path) -> Target:
    path = folder / "fuzz.json"

    def run(data: bytes) -> None:
        """The first byte: how long the pieces are that are read, and whether to pack the rest."""
        first, content = data[:1] or b"\0", data[1:]
        files.CHUNK_BYTES = 1 + (first[0] % PACKED) ** 2
        if first[0] & PACKED:
            content = gzip.compress(content, 1)
        path.write_bytes(content)
        try:
            trace = read_trace(path, max_bytes=1 << 16)
        except TraceError as error:
            text = str(error)
            assert text.startswith(str(path)) and "\n" not in text, text
        else:
            assert trace.count > 0

    gpu = TraceFile(steps=1, deviceProperties=[{"id": 0, "name": "H100"}], warpwatch={"rank": 1})
    gpu.kernel(4000, 5000, launched_us=3990)
    cpu = cpu_rank(0)
    del cpu.events[3:]
    texts = [json.dumps(one.head | {"traceEvents": one.events}).encode() for one in (gpu, cpu)]
    texts += [
        json.dumps(cpu.events, indent=1).encode(), b'\xef\xbb\xbf{"traceEvents":[{"ph":"X"},]}',
    ]  # fmt: skip
    seeds = [bytes([first]) + text for text in texts for first in (3, 99, 99 | PACKED)]
    seeds += [b"\x63" + gzip.compress(texts[0]), b"\x63" + gzip.compress(texts[0])[:99]]
    tokens = (b"},{", b"[[[[[[[[", b'{"a":' * 8, b"1e999", b"NaN", b"9" * 60, b"\\ud800", b'"ts":')
    return Target(run, seeds, (*tokens, b"\xef\xbb\xbf", b"null", b'"args":{'), 3072)
