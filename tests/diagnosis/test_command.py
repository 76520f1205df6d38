"""``python -m warpwatch_diagnosis``: what it prints, and how it exits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.diagnosis.traces import cpu_rank
from warpwatch_diagnosis.__main__ import main


def test_a_healthy_trace_exits_0_and_says_so_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cpu_rank(0).write(tmp_path / "rank0.json")
    assert main([str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "healthy: operators run for 100 % of the step and nothing stands out"
    assert lines[2] == "rank0.json, rank 0, CPU only, 4 steps, 0.040 s"


def test_a_problem_exits_1_and_json_has_the_documented_keys(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cpu_rank(3, loading_us=6000).write(tmp_path / "a.json")
    assert main([str(path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    documented = {"schema", "traces", "findings", "verdict", "summary", "collectives", "comparison"}
    assert set(found) == documented
    assert (found["schema"], found["verdict"]) == (1, "data_loading")
    finding = found["findings"][0]
    assert list(finding) == [
        "kind", "rank", "share", "recoverable_s", "confidence", "evidence", "advice",
    ]  # fmt: skip
    assert (finding["rank"], finding["share"], finding["recoverable_s"]) == (3, 0.6, 0.024)


def test_unusable_input_exits_2_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "absent.json")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert "absent.json: No such file" in captured.err


@pytest.mark.parametrize("option", ["--html", "--trace-out"])
def test_a_file_that_cannot_be_written_exits_2(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cpu_rank(0).write(tmp_path / "a.json")
    assert main([str(path), option, str(tmp_path / "no" / "r.html")]) == 2
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--html", "--trace-out"])
def test_a_trace_that_is_read_is_never_overwritten(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cpu_rank(0).write(tmp_path / "a.json")
    before = path.read_bytes()
    assert main([str(path), option, str(tmp_path / "." / "a.json")]) == 2
    assert path.read_bytes() == before
    assert "name another file" in capsys.readouterr().err


def test_the_text_has_the_verdict_then_the_advice_then_where_the_time_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = cpu_rank(3, loading_us=6000).write(tmp_path / "a.json")
    assert main([str(path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "data_loading: 60 % of the step is spent fetching the next batch"
    assert (
        lines[2]
        == "1. data_loading, rank 3: 60 % of the step, 0.024 s to win back, confidence high"
    )
    advice = next(n for n, line in enumerate(lines) if line.startswith("   Advice: "))
    table = lines.index("   where the time goes         share     a step")
    assert 2 < advice < table
    assert lines[table + 1] == (
        "   Waiting for data           60.0 %     6.0 ms  ████████████████████████"
    )
    assert lines[table + 2] == "   Operators                  40.0 %     4.0 ms  ████████████████"


def test_the_text_of_many_ranks_is_a_row_each_and_fits_100_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = cpu_rank(0, host_us=5000).write(tmp_path / "rank0.json")
    fast = [
        cpu_rank(rank, waiting_us=5000, loading_us=200).write(tmp_path / f"rank{rank}.json")
        for rank in range(1, 8)
    ]
    assert main([str(path) for path in (slow, *fast)]) == 1
    lines = capsys.readouterr().out.splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("   share of time"))
    assert lines[head].split()[5:] == ["operators", "waiting", "data", "python"]
    row = ["rank", "0", "10.0", "ms", "50.0", "%", "0.0", "%", "0.0", "%", "50.0", "%"]
    assert lines[head + 1].split() == row
    assert lines[head + 8].split()[:2] == ["rank", "7"]
    assert max(map(len, lines)) <= 100


def test_against_a_baseline_the_text_says_what_changed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = cpu_rank(0, loading_us=6000).write(tmp_path / "slow.json")
    well = cpu_rank(0, loading_us=100).write(tmp_path / "well.json")
    assert main([str(slow), "--baseline", str(well)]) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("Against the baseline:")
    assert lines[at + 1] == "   - rank 0: a step takes 10.0 ms, in the baseline 10.0 ms"
    assert "   - data loading: 0.1 ms -> 6.0 ms (+5.9 ms)" in lines[at:]


def test_a_terminal_without_unicode_gets_the_text_all_the_same(tmp_path: Path) -> None:
    path = cpu_rank(3, loading_us=6000).write(tmp_path / "a.json")
    command = [sys.executable, "-m", "warpwatch_diagnosis", str(path)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert b"Waiting for data           60.0 %     6.0 ms  ????" in done.stdout


def test_the_module_runs_as_a_process_and_its_help_has_an_example() -> None:
    command = [sys.executable, "-m", "warpwatch_diagnosis", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert "example: python -m warpwatch_diagnosis rank0.pt.trace.json.gz" in done.stdout


def run_into(output: int, path: Path) -> tuple[int, str]:
    """Exit status and what the command says about an output that takes nothing."""
    command = [sys.executable, "-m", "warpwatch_diagnosis", str(path), "--json"]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False)
    return done.returncode, done.stderr.decode()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_full_disk_under_the_output_is_reported_in_one_line(tmp_path: Path) -> None:
    path = cpu_rank(0).write(tmp_path / "a.json")
    with Path("/dev/full").open("wb") as full:
        status, said = run_into(full.fileno(), path)
    assert (status, said) == (2, "python -m warpwatch_diagnosis: output: No space left on device\n")


def test_a_reader_that_has_seen_enough_is_no_error(tmp_path: Path) -> None:
    path = cpu_rank(0).write(tmp_path / "a.json")
    reading, writing = os.pipe()
    os.close(reading)
    try:
        assert run_into(writing, path) == (0, "")
    finally:
        os.close(writing)


def test_too_little_memory_is_reported_in_one_line(tmp_path: Path) -> None:
    step = {"ph": "X", "cat": "user_annotation", "name": "ProfilerStep#1", "ts": 5, "dur": 1}
    path = tmp_path / "large.json"
    path.write_text(
        '{"traceEvents":[' + json.dumps(step) + ',{"name":"' + "x" * (64 << 20) + '"}]}'
    )
    limited = (
        "import resource, sys\n"
        "from warpwatch_diagnosis.__main__ import main\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20),) * 2)\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", limited, str(path)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "python -m warpwatch_diagnosis: out of memory; capture fewer steps\n"
