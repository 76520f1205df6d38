"""``python -m warpwatch_diagnosis``: what it prints, and how it exits."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.diagnosis.captures import written
from tests.diagnosis.traces import TraceFile, cpu_rank
from warpwatch_diagnosis.__main__ import main

MODULE = (sys.executable, "-m", "warpwatch_diagnosis")


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Return its exit status, the lines of its output, and what it reports as an error."""

    def run(*ranks: TraceFile, options: tuple[str, ...] = ()) -> tuple[int, list[str], str]:
        status = main([*map(str, written(tmp_path, *ranks)), *options])
        captured = capsys.readouterr()
        return status, captured.out.splitlines(), captured.err

    return run


def test_a_problem_exits_1_and_each_form_has_it(command, tmp_path):
    page = tmp_path / "report.html"
    before = map(str, written(tmp_path, cpu_rank(0), cpu_rank(1), name="before"))
    options = ("--json", "--html", str(page), "--baseline", *before)
    status, lines, _ = command(cpu_rank(3, loading_us=6000), options=options)
    found = json.loads("\n".join(lines))
    assert (status, found["schema"], found["verdict"]) == (1, 1, "data_loading")
    assert "<h1>Waiting for data</h1>" in page.read_text()


def started(
    *arguments: object, stdout: int = subprocess.PIPE, **options: Any
) -> subprocess.CompletedProcess[str]:
    command = [*map(str, arguments)]
    return subprocess.run(
        command, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=300, **options
    )


def test_a_terminal_without_unicode_gets_the_text_all_the_same(tmp_path):
    path = cpu_rank(3, loading_us=6000).write(tmp_path / "a.json")
    done = started(*MODULE, path, env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 1
    assert "Waiting for data           60.0 %     6.0 ms  ????" in done.stdout


def test_a_full_output_is_reported_but_not_a_closed_one(tmp_path):
    path = cpu_rank(0).write(tmp_path / "a.json")
    # At its exit Python writes a buffered output again.
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}
    with Path("/dev/full").open("wb") as full:
        done = started(*MODULE, path, stdout=full.fileno(), env=buffered)
    assert done.returncode == 2
    assert done.stderr == "python -m warpwatch_diagnosis: output: No space left on device\n"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = started(*MODULE, path, stdout=writing, env=buffered)
        assert (done.returncode, done.stderr) == (0, "")
    finally:
        os.close(writing)


def test_too_little_memory_is_reported_in_one_line(tmp_path):
    path = tmp_path / "large.json"
    path.write_text('{"traceEvents":[{"name":"' + "x" * (14 << 20) + '"}]}')
    limited = (
        "import resource, sys\n"
        "from warpwatch_diagnosis.__main__ import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (8 << 20),) * 2)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = started(sys.executable, "-c", limited, path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -m warpwatch_diagnosis: out of memory; capture fewer steps\n"
