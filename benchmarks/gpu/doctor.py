"""What `warpwatch doctor` says of this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.gpu.check import Finding, Part, Setting
from benchmarks.processes import clean_environment

TIMEOUT_S = 25.0


def parts(setting: Setting) -> Iterator[Part]:
    yield Part("doctor", ask, findings)


def ask() -> dict[str, Any]:
    command = [sys.executable, "-m", "warpwatch_daemon", "doctor", "--json"]
    answer = subprocess.run(
        command, capture_output=True, text=True, timeout=TIMEOUT_S, env=clean_environment()
    )
    try:
        return {"exit": answer.returncode, "checks": json.loads(answer.stdout)}
    except ValueError as error:
        said = (answer.stderr or answer.stdout).strip().splitlines() or ["nothing was said"]
        raise RuntimeError(f"no JSON, exit {answer.returncode}: {said[-1]}") from error


def findings(measured: dict[str, Any]) -> Iterable[Finding]:
    """That it finds fault with this machine is no fault of the doctor."""
    oks = [check["ok"] for check in measured["checks"]]
    counts = ", ".join(f"{oks.count(ok)} {text}" for ok, text in _ANSWERS.items())
    yield Finding(measured["exit"] in (0, 1), f"{len(oks)} checks: {counts}")
    for check in measured["checks"]:
        if check["ok"] is False:
            words = [str(check[key]) for key in ("name", "detail", "text") if check.get(key)]
            yield Finding(None, f"it finds: {': '.join(words)}"[:200])


_ANSWERS = {True: "fine", False: "wrong", None: "unknown"}
