"""What `nvidia-smi -q -x` says, as one flat table a GPU, and whether a value of ours is the same.

``readers.csv`` holds a line for each of our series (without ``device_``) that nvidia-smi knows:
the path in its XML as the drivers 550 to 580 write it, the factor from its unit to ours, and how
far the value may move, in our unit, within the seconds between two readings. Of paths that ``|``
parts the first that the driver writes counts. The XML has no totals of ECC errors: without SRAM
errors those of device memory are the same. Asking for a PCIe link wakes it up.
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.report import CannotCheck

TABLE = Path(__file__).with_name("readers.csv")
TIMEOUT_S = 20.0
# What it writes where there is no value.
ABSENT = ("", "N/A", "[N/A]", "Not Supported", "[Not Supported]", "Unknown Error", "Not Found")
AGREE, BETWEEN, DIFFERS = "agree", "between", "differs"
OURS_ONLY, THEIRS_ONLY, NOT_COMPARABLE = "ours_only", "theirs_only", "not_comparable"

_WORDS = {
    **{"Enabled": 1.0, "Disabled": 0.0, "Active": 1.0, "Not Active": 0.0, "Yes": 1.0, "No": 0.0},
    # Compute mode, recovery action.
    **{"Default": 0.0, "Prohibited": 2.0, "Exclusive_Process": 3.0},
    **{"None": 0.0, "Reset": 1.0, "Reboot": 2.0, "Drain P2P": 3.0, "Drain and Reset": 4.0},
}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")

# Texts by path in the XML.
Leaves = dict[str, str]


class SmiReading(NamedTuple):
    """A line of the table: ours = theirs x ``factor``, give or take ``moves``."""

    series: str
    paths: tuple[str, ...]
    factor: float
    moves: float

    def text(self, leaves: Leaves) -> str:
        return next((leaves[path] for path in self.paths if path in leaves), "")


def readings() -> list[SmiReading]:
    with TABLE.open(newline="") as file:
        _, *lines = csv.reader(file)
    return [
        SmiReading(series, tuple(path.split("|")), float(factor or 1), float(moves or 0))
        for series, path, factor, moves in lines
    ]


def read() -> dict[str, Leaves]:
    """By UUID. Raises CannotCheck."""
    path = shutil.which("nvidia-smi")
    if path is None:
        raise CannotCheck("there is no nvidia-smi")
    try:
        text = subprocess.check_output([path, "-q", "-x"], text=True, timeout=TIMEOUT_S)
    except subprocess.SubprocessError as error:
        raise CannotCheck(f"nvidia-smi does not answer: {error}") from error
    return parse(text)


def parse(text: str) -> dict[str, Leaves]:
    """By UUID; a path that stands more than once keeps its first text."""
    root = ElementTree.fromstring(text)
    found = {}
    for gpu in root.findall("gpu"):
        leaves = {"driver_version": root.findtext("driver_version", "")}
        _walk(gpu, "", leaves)
        found[leaves["uuid"]] = leaves
    return found


def _walk(element: ElementTree.Element, folder: str, leaves: Leaves) -> None:
    for child in element:
        if len(child):
            _walk(child, f"{folder}{child.tag}/", leaves)
        else:
            leaves.setdefault(f"{folder}{child.tag}", (child.text or "").strip())


def number(text: str) -> float | None:
    """Without its unit: ``75.30 W``, ``16x``, ``P8``, ``1920 bank(s)``, ``Active``."""
    match = _NUMBER.search(text)
    return _WORDS.get(text, float(match[0]) if match else None)


def verdict(reading: SmiReading, ours: float | None, before: str, after: str) -> str:
    """Of our value between two readings of nvidia-smi's."""
    first, second = number(before), number(after)
    theirs_known = before not in ABSENT or after not in ABSENT
    if ours is None:
        return THEIRS_ONLY if theirs_known else AGREE
    if first is None or second is None:
        return NOT_COMPARABLE if theirs_known else OURS_ONLY
    low, high = sorted((first * reading.factor, second * reading.factor))
    # What is written is rounded or cut off at its last digit: 0.01 of 75.30 W.
    fraction = after.partition(".")[2].partition(" ")[0]
    step = 10.0 ** -len(fraction) * reading.factor * 1.001
    if min(abs(ours - low), abs(ours - high)) <= step:
        return AGREE
    room = step + reading.moves
    return BETWEEN if low - room <= ours <= high + room else DIFFERS
