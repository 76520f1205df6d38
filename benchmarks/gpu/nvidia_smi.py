"""What `nvidia-smi -q -x` says, as one flat table a GPU: path in the XML to text."""

from __future__ import annotations

import re
import subprocess
import xml.etree.ElementTree as ElementTree

TIMEOUT_S = 20.0
Leaves = dict[str, str]

# What it writes where there is no value.
ABSENT = ("", "N/A", "[N/A]", "Not Supported", "[Not Supported]", "Unknown Error", "Not Found")
_WORDS = {
    "Enabled": 1.0, "Disabled": 0.0, "Active": 1.0, "Not Active": 0.0, "Yes": 1.0, "No": 0.0,
}  # fmt: skip
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def read(path: str) -> dict[str, Leaves]:
    """By UUID. Raises RuntimeError, OSError, TimeoutExpired."""
    answer = subprocess.run([path, "-q", "-x"], capture_output=True, text=True, timeout=TIMEOUT_S)
    if answer.returncode:
        raise RuntimeError(f"nvidia-smi ended with {answer.returncode}: {answer.stdout[:200]}")
    return parse(answer.stdout)


def parse(text: str) -> dict[str, Leaves]:
    """By UUID; a path that stands more than once keeps its first text."""
    root = ElementTree.fromstring(text)
    version = root.findtext("driver_version", "")
    found = {}
    for gpu in root.findall("gpu"):
        leaves: Leaves = {"driver_version": version}
        _walk(gpu, "", leaves)
        found[leaves["uuid"]] = leaves
    return found


def number(text: str | None) -> float | None:
    """Without its unit: ``75.30 W``, ``16x``, ``P8``, ``1920 bank(s)``, ``Active``."""
    if text is None or text.strip() in ABSENT:
        return None
    text = text.strip()
    if text in _WORDS:
        return _WORDS[text]
    match = _NUMBER.search(text)
    return float(match[0]) if match else None


def resolution(text: str) -> float:
    """The last digit that is written: 0.01 of ``75.30 W``."""
    match = _NUMBER.search(text)
    fraction = match[1] if match else None
    return 10.0 ** -(len(fraction) - 1) if fraction else 1.0


def _walk(element: ElementTree.Element, path: str, leaves: Leaves) -> None:
    for child in element:
        own = f"{path}/{child.tag}" if path else child.tag
        if len(child):
            _walk(child, own, leaves)
        else:
            leaves.setdefault(own, (child.text or "").strip())
