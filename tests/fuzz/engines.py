"""Where inputs come from: atheris, guided by coverage, or mutations of the seeds alone."""

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.fuzz.watch import Target

OWN = ("", "_capturing", "_daemon", "_devices", "_diagnosis", "_fleet", "_telemetry")
INSTRUMENTED = [*(f"warpwatch{package}" for package in OWN), "prometheus_client", "yaml"]
NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63)

Run = Callable[[bytes], None]


def has_atheris() -> bool:
    return importlib.util.find_spec("atheris") is not None


def instrumented(load: Callable[[], Target]) -> Target:
    """Load a target whose imports report the branches that they take."""
    import atheris

    with atheris.instrument_imports(include=INSTRUMENTED):
        return load()


def guided(target: Target, run: Run, corpus: Path, work: Path) -> None:
    """Fuzz until ``run`` ends the process; inputs that reach new branches stay in ``corpus``."""
    import atheris

    seeds, words = work / "seeds", work / "words"
    seeds.mkdir()
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (seeds / str(number)).write_bytes(seed)
    # A dictionary may not be empty.
    tokens = target.tokens or (b"\0",)
    escaped = ("".join(f"\\x{byte:02x}" for byte in token) for token in tokens)
    words.write_text("".join(f'"{token}"\n' for token in escaped))
    # The watching process reports inputs that take long or crash.
    limits = ["-timeout=86400", "-rss_limit_mb=0", f"-max_len={target.max_bytes}"]
    options = [*limits, f"-dict={words}", f"-artifact_prefix={work}/"]
    atheris.Setup([sys.argv[0], *options, str(corpus), str(seeds)], run)
    atheris.Fuzz()


def mutated(target: Target, seed: int) -> Iterator[bytes]:
    """The seeds, and mutations of them without an end."""
    yield from target.seeds
    chance = random.Random(seed)
    while True:
        data = chance.choice(target.seeds)
        for _ in range(chance.randint(1, 6)):
            data = _mutation(chance, data, target)
        yield data[: target.max_bytes]


def _mutation(chance: random.Random, data: bytes, target: Target) -> bytes:
    """One piece removed, replaced or put in."""
    at = chance.randint(0, len(data))
    other = chance.choice(target.seeds)
    begin = chance.randint(0, len(other))
    size = chance.choice((1, 2, 4, 8))
    number = chance.choice(NUMBERS).to_bytes(8, "little")[:size]
    tokens = chance.choices(target.tokens or (b"",), k=2)
    pieces = (b"", chance.randbytes(size), number, other[begin : begin + 64], *tokens)
    put = chance.choice(pieces)
    return data[:at] + put + data[at + chance.choice((0, len(put), size)) :]
