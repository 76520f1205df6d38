"""Fuzzes the answers of a server at dcgm-exporter's address."""

import math
from pathlib import Path

from tests.fuzz.watch import Target
from warpwatch_devices.dcgm.exporter_source import read
from warpwatch_devices.dcgm.values import device_of

GOLDEN = Path(__file__).parents[2] / "golden" / "dcgm.prom"


def run(data: bytes) -> None:
    devices, _ = read(data.decode("utf-8", "replace"))
    for scraped in devices:
        assert all(math.isfinite(value) for value in scraped.values.values())
        assert device_of(scraped.device, ()) is not None


def target(folder: Path) -> Target:
    lines = GOLDEN.read_bytes().splitlines(keepends=True)
    pages = [b"".join(lines[at : at + 6]) for at in range(0, len(lines), 6)]
    tokens = (b'GPU_I_ID="1"', b'UUID="', b'\\"', b"NaN", b"+Inf", b"1e999", b' # {a="b"} 1')
    more = (b"1_0", b"} 0x1", b"{}", b'""', b"DCGM_FI_DEV_FB_USED", b"\xc2\xa0")
    return Target(run, pages, tokens + more)
