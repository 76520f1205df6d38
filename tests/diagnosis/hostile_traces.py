"""Traces of some 100 kB that are written to keep whoever reads them busy."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path

SIZE_BYTES = 96_000
# More make no difference, but for the time that it takes to write them.
MAX_UNITS = 4_000_000
_HEAD = b'{"distributedInfo":{"rank":0,"world_size":1},"traceEvents":['


def event(category: str, name: str, begin_us: float = 1000, took_us: float = 3000) -> bytes:
    """With the comma behind it; all of one thread."""
    return (
        f'{{"ph":"X","cat":"{category}","name":"{name}","pid":1,"tid":1,'
        f'"ts":{begin_us},"dur":{took_us}}},'
    ).encode()


def _in_a_row(category: str, name: str, count: int) -> bytes:
    return b"".join(event(category, name, 1000 + n / 2, 0.25) for n in range(count))


_STEPS = b"".join(event("user_annotation", f"ProfilerStep#{n}", 1000 * n, 1000) for n in (3, 4, 5))
_LAST = event("cpu_op", "aten::mm")[:-1]
# What comes first, and what follows it as often as there is room; it may count.
_KINDS: dict[str, tuple[bytes, Callable[[int], bytes]]] = {
    "numbers": (_STEPS, lambda n: b"0,"),
    "lists": (_STEPS, lambda n: b"[],"),
    "borders in strings": (_STEPS, lambda n: b'"},",'),
    "numbers after a long value": (
        _STEPS + b'{"a":"' + b"x" * (16 << 20) + b'"},',
        lambda n: b"0,",
    ),
    "frames around reads": (
        _STEPS + _in_a_row("cpu_op", "aten::nonzero", 4000),
        lambda n: event("python_function", "train.py(1): step"),
    ),
    "steps over each other": (
        _in_a_row("kernel", "k", 6000),
        lambda n: event("user_annotation", f"ProfilerStep#{n}"),
    ),
    "long names": (
        _STEPS,
        lambda n: event("user_annotation", f"{n}" + "checkpoint" * 990),
    ),
}
HOSTILE = tuple(_KINDS)


def write_hostile(kind: str, path: Path) -> Path:
    """``kind``: of HOSTILE."""
    first, unit = _KINDS[kind]
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    packed = [packer.compress(_HEAD + first)]
    count, size = 0, len(packed[0])
    while size < SIZE_BYTES and count < MAX_UNITS:
        packed.append(packer.compress(b"".join(map(unit, range(count, count + 200)))))
        count += 200
        size += len(packed[-1])
    packed.append(packer.compress(_LAST + b"]}") + packer.flush())
    path.write_bytes(b"".join(packed))
    return path
