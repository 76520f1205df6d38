"""What functions and small classes of the telemetry and the runtime return, as a golden file."""

import io
import itertools
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import expressions
from tests.conftest import Cases
from warpwatch_daemon.config import Config

MODULES = {
    "": "io itertools logging os",
    "warpwatch_telemetry": "alerts anomalies bus_messages captures catalogue clean_text errors "
    "jobs log records samples sections state stream xids",
    "warpwatch_runtime": "agent_metrics bus command_line directory files http_requests loading "
    "log_output supervisor",
}


def test_functions_return_the_golden_values(
    cases: Cases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = itertools.count()

    def file(content: bytes | str) -> Path:
        path = Path(f"file{next(numbers)}")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def printed(subject: object, *calls: Any) -> object:
        """Return as ``play``, and what was written to both streams."""
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            return expressions.play(subject, *calls), out.getvalue(), err.getvalue()

    known: dict[str, Any] = {"Config": Config, "Fake": SimpleNamespace, "Path": Path}
    known |= {one.__name__: one for one in (file, printed, partial, replace)}
    expressions.check(cases, "telemetry/functions.txt", MODULES, known)
