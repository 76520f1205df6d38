"""`warpwatch diagnose`: say what a torch.profiler trace shows."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from warpwatch_diagnosis import __main__ as diagnosis
from warpwatch_runtime.command_line import ProgressLines

if TYPE_CHECKING:
    from warpwatch_capturing.remote_store import Fetched

PROGRAM = "warpwatch diagnose"
# s3://bucket/…, not the name of a file.
_ADDRESS = re.compile(r"[a-z0-9]+://\S+")
_BASELINE = "--baseline"


def main(argv: Sequence[str]) -> int:
    """Diagnose traces; an address stands for a capture's traces, baseline and anomaly."""
    addresses = [argument for argument in argv if _ADDRESS.fullmatch(argument)]
    progress = ProgressLines()
    reading = partial(progress.show, "reading traces")
    if not addresses:
        return diagnosis.main(list(argv), prog=PROGRAM, reading=reading)
    # Imported only for addresses: it loads half of the daemon.
    from warpwatch_capturing.remote_store import fetch

    with tempfile.TemporaryDirectory(prefix="warpwatch-") as folder:
        fetched = {}
        for number, address in enumerate(dict.fromkeys(addresses)):
            into = Path(folder, str(number))
            into.mkdir()
            fetched[address] = fetch(address, into, partial(progress.show, "fetching"))
        missing = {k: why for one in fetched.values() for k, why in one.missing.items()}
        nodes = {k: node for one in fetched.values() for k, node in one.nodes.items()}
        return diagnosis.main(
            list(_local(argv, fetched)),
            prog=PROGRAM,
            missing=missing,
            nodes=nodes,
            anomaly=next((one.asked for one in fetched.values() if one.asked), None),
            reading=reading,
        )


def _local(argv: Sequence[str], fetched: dict[str, Fetched]) -> Iterator[str]:
    """Yield the arguments, with files in place of addresses."""
    for argument in argv:
        yield from map(str, fetched[argument].traces) if argument in fetched else [argument]
    baseline = [str(path) for one in fetched.values() for path in one.baseline]
    is_named = any(argument.partition("=")[0] == _BASELINE for argument in argv)
    if baseline and not is_named:
        yield from (_BASELINE, *baseline)
