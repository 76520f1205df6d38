"""Reductions of traces, which come from other nodes, up to the diagnosis over ranks."""

import gzip
import zlib
from pathlib import Path

from tests.diagnosis.trace.odd_traces import verdict
from tests.diagnosis.traces import cpu_rank, rank_trace
from tests.fuzz.watch import Target
from warpwatch_diagnosis.measures.measures import measure
from warpwatch_diagnosis.measures.reduction import pack
from warpwatch_diagnosis.trace.reader import read_trace

# The first byte of an input: the bytes of the file follow, or what it packs.
FILE, CONTENT = b"\0", b"\1"


def target(folder: Path) -> Target:
    path = folder / "rank0.reduction.gz"

    def run(data: bytes) -> None:
        content = data[1:]
        path.write_bytes(gzip.compress(content, 1) if data[:1] == CONTENT else content)
        verdict(path)

    traces = [rank_trace(0), cpu_rank(0, loading_us=900)]
    packed = [pack(measure(read_trace(one.write(folder / "rank0.json")))) for one in traces]
    contents = [zlib.decompress(one, wbits=31) for one in packed]
    seeds = [FILE + one for one in packed] + [CONTENT + one for one in contents]
    # MessagePack: nil, true, a float, nested lists, an extension, a large map.
    tokens = (
        b"\xc0", b"\xc3", b"\xcb\x7f\xf0\0\0\0\0\0\0", b"\xcb\xff\xf8\0\0\0\0\0\0", b"\x91" * 8,
        b"\xc7\x01\x01\x90", b"\xdf\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7),
    )  # fmt: skip
    return Target(run, seeds, tokens, max(map(len, seeds)) + 64)
