"""Runs one check in a process group of its own with a deadline, and gives it what it needs.

``python -m benchmarks.gpu.runner CHECK REPORT SETTING`` is that process: if it hangs or crashes,
the other checks go on. It needs only the standard library to report what is missing.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


class CannotCheck(Exception):
    """Raised with one line: why there is nothing to check here."""


@dataclass(frozen=True, slots=True)
class RunSetting:
    """Where and how a check runs.

    ``out`` is the folder of the results. With ``fake`` the driver is the fake one of the tests.
    ``quick`` makes windows short, to try the checks themselves. ``device`` is torch's: cuda, or cpu
    to try the programs without a GPU.
    """

    out: str
    fake: bool = False
    quick: bool = False
    device: str = "cuda"

    def need_torch(self) -> None:
        """Raise CannotCheck if nothing can be computed on the device."""
        if self.fake and self.device == "cuda":
            raise CannotCheck("the fake driver has no CUDA")
        if importlib.util.find_spec("torch") is None:
            raise CannotCheck("torch is not installed")


class Report:
    """The output of a check: JSON lines in a file, which stay if the check is killed."""

    def __init__(self, setting: RunSetting, file: Path) -> None:
        self.setting = setting
        self._file = file

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """Keep the figures that the block adds; an exception ends only this part."""
        figures: dict[str, Any] = {}
        self._write(begun=name)
        try:
            yield figures
        except CannotCheck as reason:
            figures["skipped"] = str(reason)
        except Exception as error:
            traceback.print_exc()
            figures["error"] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            self.expect(False, f"{name}: {figures['error']}")
        self._write(part=name, figures=figures)

    def fact(self, text: str) -> None:
        self._write(ok=None, text=text)

    def expect(self, ok: bool, text: str, *, timed: bool = False) -> None:
        """Write a judged line; a quick run does not judge times and costs (``timed``)."""
        self._write(ok=None if timed and self.setting.quick else ok, text=text)

    def _write(self, **entry: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(entry) + "\n")


# The checks in their order: the module, and the seconds that each may take; ten minutes in all.
CHECKS: dict[str, tuple[str, float]] = {
    "readers": ("values", 60.0),
    "calls": ("daemon", 60.0),
    "counters": ("values", 90.0),
    "footprint": ("daemon", 80.0),
    "shim": ("loop", 160.0),
    "capture": ("loop", 120.0),
}
STOP_TIMEOUT_S = 5.0


def run_check(name: str, setting: RunSetting, timeout_s: float, work: Path) -> dict[str, Any]:
    """Return a check's result; if it was killed, what it had measured by then."""
    written, log = work / f"{name}.jsonl", work / f"{name}.log"
    arguments = [name, str(written), json.dumps(asdict(setting))]
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.runner", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Temporary files of a killed check are removed with this folder.
            env={**os.environ, "TMPDIR": str(work)},
            start_new_session=True,
        )
    why = f"not done within {timeout_s:.0f} s"
    with contextlib.suppress(subprocess.TimeoutExpired):
        if process.wait(timeout_s):
            wrote = log.read_text(errors="replace").strip().rpartition("\n")[2]
            why = f"it ended with {process.returncode}: {wrote[:200]}"
        else:
            why = ""
    # Stop its children too; a process that is stuck in the driver stays.
    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP_TIMEOUT_S)
    lines = written.read_text().splitlines(keepends=True) if written.exists() else []
    # The last line of a killed check may be incomplete.
    entries = [json.loads(line) for line in lines if line.endswith("\n")]
    return {**result_of(entries, why), "took_s": round(time.monotonic() - began, 1)}


def result_of(entries: list[dict[str, Any]], why: str = "") -> dict[str, Any]:
    """Summarize the entries of a check; ``why``: the reason if it did not finish."""
    parts = {entry["part"]: entry["figures"] for entry in entries if "part" in entry}
    lines = [entry for entry in entries if "ok" in entry]
    unfinished = [entry["begun"] for entry in entries if entry.get("begun", "") not in ("", *parts)]
    bad = sum(line["ok"] is False for line in lines)
    skipped = [figures.get("skipped") for figures in parts.values()]
    if why or bad:
        status = "failed"
        why = " in part ".join([why, *unfinished]) or f"{bad} of {len(lines)} lines are bad"
    elif parts and all(skipped):
        status, why = "skipped", str(skipped[0])
    else:
        status = "ok"
    return {"status": status, "why": why, "parts": parts, "lines": lines}


def main(name: str, file: str, setting: str) -> None:
    report = Report(RunSetting(**json.loads(setting)), Path(file))
    module_name, _ = CHECKS.get(name, (name, 0.0))
    try:
        module = importlib.import_module(f"benchmarks.gpu.{module_name}")
    except ModuleNotFoundError as error:
        with report.part("packages"):
            raise CannotCheck(f"{error.name} is not installed") from error
    else:
        getattr(module, f"check_{name}")(report)


if __name__ == "__main__":
    main(*sys.argv[1:])
