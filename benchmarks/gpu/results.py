"""What is written: results.json for machines, a summary for people."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA = 1
_MARKS = {True: "ok  ", False: "BAD ", None: "    "}
# What the daemon and the checks need, by the name that is imported.
_NEEDED = (
    "grpc", "h11", "jinja2", "msgspec", "psutil", "pynvml", "starlette", "torch", "uvicorn",
    "yaml",
)  # fmt: skip
# What identifies a machine does not belong into a result that is published.
_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_VERSIONED = ("nvidia-ml-py", "numpy", "torch")


def overall(result: dict[str, Any]) -> dict[str, str]:
    """The status of a check: skipped where nothing could be measured, failed where one thing is
    not as it should be."""
    if "why" in result:
        return {"status": "skipped", "why": result["why"]}
    if any(finding["ok"] is False for finding in result["findings"]):
        bad = sum(1 for finding in result["findings"] if finding["ok"] is False)
        return {"status": "failed", "why": f"{bad} of {len(result['findings'])} lines are bad"}
    skipped = [part["skipped"] for part in result["parts"].values() if "skipped" in part]
    if len(skipped) == len(result["parts"]):
        return {"status": "skipped", "why": skipped[0] if skipped else "it has no parts"}
    return {"status": "ok", "why": ""}


def machine(fake: bool) -> dict[str, Any]:
    """What it is measured on; facts only, nothing that identifies the machine."""
    return {
        "gpu": gpu_name(fake),
        "nvidia_smi": None if fake else _nvidia_smi("name,driver_version,vbios_version,pstate"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "root": os.geteuid() == 0,
        "versions": {name: _version(name) for name in _VERSIONED},
        "missing": [name for name in _NEEDED if importlib.util.find_spec(name) is None],
    }


def gpu_name(fake: bool) -> str:
    return "fake" if fake else (_nvidia_smi("name") or "no-gpu").splitlines()[0]


def default_folder(root: Path, fake: bool) -> Path:
    """``benchmarks/gpu/results/<gpu>-<date>``; of the fake driver nothing is worth keeping."""
    if fake:
        return root / "build" / "gpu-fake"
    name = re.sub(r"[^a-z0-9]+", "-", gpu_name(fake).lower()).strip("-")
    date = time.strftime("%Y-%m-%d", time.gmtime())
    return root / "benchmarks" / "gpu" / "results" / f"{name}-{date}"


def write(folder: Path, on: dict[str, Any], checks: list[dict[str, Any]], began: float) -> None:
    """``began``: wall clock."""
    document = {
        "schema": SCHEMA,
        "time": round(began, 3),
        "took_s": round(time.time() - began, 1),
        "machine": on,
        "checks": {check["check"]: check for check in checks},
    }
    new = folder / "results.json.new"
    text = _UUID.sub(r"\1-0", json.dumps(document, separators=(",", ":")))
    new.write_text(f"{text}\n")
    new.replace(folder / "results.json")


def summary(check: dict[str, Any]) -> Iterator[str]:
    why = f": {check['why']}" if check["why"] else ""
    yield f"{check['check']}: {check['status']}{why} ({check.get('took_s', 0):.0f} s)"
    for name, part in check.get("parts", {}).items():
        if "skipped" in part and check["status"] != "skipped":
            yield f"  skip {name}: {part['skipped']}"
    for finding in check.get("findings", ()):
        yield f"  {_MARKS[finding['ok']]} {finding['text']}"


def _nvidia_smi(query: str) -> str | None:
    path = shutil.which("nvidia-smi")
    if path is None:
        return None
    command = [path, f"--query-gpu={query}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        print(f"nvidia-smi does not answer: {error}", file=sys.stderr)
        return None
    return answer.stdout.strip() or None


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
