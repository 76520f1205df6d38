"""One check, in the process that may hang or crash without costing another one.

    python -m benchmarks.gpu.child CHECK RESULT.json OUT [fake] [quick] [cpu]

The result is rewritten after each part, so that it is whole when this process is killed.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import CannotCheck, Part, Setting
from benchmarks.gpu.results import overall


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:300] if text else type(error).__name__


def run_part(part: Part) -> tuple[Any, list[dict[str, Any]]]:
    """What was measured, or why not; and what it means."""
    began = time.monotonic()
    try:
        measured = part.measure()
        findings = [{"ok": f.ok, "text": f.text} for f in part.findings(measured)]
        return {"took_s": round(time.monotonic() - began, 2), "measured": measured}, findings
    except CannotCheck as reason:
        return {"skipped": str(reason)}, []
    except Exception as error:
        traceback.print_exc()
        failure = {"error": one_line(error), "took_s": round(time.monotonic() - began, 2)}
        return failure, [{"ok": False, "text": f"{part.name}: {one_line(error)}"}]


def parts_of(name: str, setting: Setting) -> Iterator[Part]:
    """Raises CannotCheck where a package is missing."""
    try:
        module = importlib.import_module(f"benchmarks.gpu.{name}")
    except ModuleNotFoundError as error:
        raise CannotCheck(f"{error.name} is not installed") from error
    parts: Iterator[Part] = module.parts(setting)
    return parts


def run(name: str, result_file: Path, setting: Setting) -> None:
    result: dict[str, Any] = {"check": name, "parts": {}, "findings": []}
    try:
        for part in parts_of(name, setting):
            result["running"] = part.name
            _write(result_file, result)
            result["parts"][part.name], findings = run_part(part)
            result["findings"] += findings
    except CannotCheck as reason:
        result["why"] = str(reason)
    result.pop("running", None)
    _write(result_file, {**result, **overall(result)})


def _write(path: Path, result: dict[str, Any]) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(result))
    new.replace(path)


def main(argv: list[str]) -> None:
    name, result_file, out, *flags = argv
    device = "cpu" if "cpu" in flags else "cuda"
    setting = Setting(Path(out), "fake" in flags, "quick" in flags, device)
    run(name, Path(result_file), setting)


if __name__ == "__main__":
    main(sys.argv[1:])
