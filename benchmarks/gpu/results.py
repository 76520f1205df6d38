"""What the run writes: results.json for machines, a summary for people."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import time
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu import nvidia_smi
from benchmarks.gpu.report import CannotCheck

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = 2
_MARKS = {True: "ok  ", False: "BAD ", None: "    "}
# What identifies a machine does not belong into a result that is published.
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def machine(fake: bool) -> dict[str, Any]:
    """What it is measured on; nothing that identifies the machine."""
    facts = {"product_name": "fake"} if fake else {}
    with contextlib.suppress(CannotCheck):
        facts = facts or next(iter(nvidia_smi.read().values()), {})
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [re.split(r"[^\w.-]", need)[0] for need in project["dependencies"]]
    return {
        "gpu": facts.get("product_name", "no-gpu"),
        "driver_version": facts.get("driver_version"),
        "vbios_version": facts.get("vbios_version"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "root": os.geteuid() == 0,
        # Null: not installed.
        "versions": {name: _version(name) for name in (*needed, "torch")},
    }


def default_folder(gpu: str) -> Path:
    """``benchmarks/gpu/results/<gpu>-<date>``; of the fake driver nothing is worth keeping."""
    if gpu == "fake":
        return ROOT / "build" / "gpu-fake"
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    return ROOT / "benchmarks/gpu/results" / f"{name}-{time.strftime('%Y-%m-%d', time.gmtime())}"


def write(folder: Path, measured_on: dict[str, Any], checks: dict[str, Any]) -> None:
    now = round(time.time(), 3)
    document = {"schema": SCHEMA, "time": now, "machine": measured_on, "checks": checks}
    text = _UUID.sub(r"\1-0", json.dumps(document, separators=(",", ":")))
    (folder / "results.json").write_text(f"{text}\n")


def summary(name: str, result: dict[str, Any]) -> Iterator[str]:
    why = f": {result['why']}" if result["why"] else ""
    yield f"{name}: {result['status']}{why} ({result['took_s']:.0f} s)"
    for part, figures in result["parts"].items():
        if "skipped" in figures and result["status"] != "skipped":
            yield f"  skip {part}: {figures['skipped']}"
    for line in result["lines"]:
        yield f"  {_MARKS[line['ok']]} {line['text']}"


def _version(distribution: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    return None
