"""The command line: help with an example, one-line errors, the exit status that scripts need."""

import json
import os
import signal
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from warpwatch_daemon.cli import GROUP, main

ROOT = Path(__file__).parents[3]
CASES = cases(__file__)
COMMANDS = sorted(metadata.entry_points(group=GROUP).names)
# Where no daemon listens.
NO_DAEMON = "http://127.0.0.1:9"


def printed(capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    captured = capsys.readouterr()
    return captured.out, captured.err


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command, capsys, monkeypatch, golden_case):
    monkeypatch.setenv("COLUMNS", "100")
    try:
        status = main([command, "--help"])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 0
    out, _ = printed(capsys)
    assert "example" in out
    golden_case(out)


def test_the_commands_are_registered_as_entry_points():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    registered = {one.name: one.value for one in metadata.entry_points(group=GROUP)}
    assert registered == project["entry-points"][GROUP]


def test_help_says_what_each_command_does_and_imports_none():
    code = (
        "import sys; from warpwatch_daemon.cli import main; print(main([]));"
        "print([name for name in sys.modules if name.startswith('warpwatch_daemon.cli.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    *lines, ended, imported = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[lines.index("commands:") + 1 :][: len(COMMANDS)]] == (
        COMMANDS
    )
    assert "  status    show jobs, anomalies and captures of a daemon" in lines
    assert (ended, imported) == ("2", "[]")
    # A reader that exits ends the command in order.
    command = [sys.executable, "-m", "warpwatch_daemon", "metrics"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as left:
        assert left.stdout is not None and left.stderr is not None
        left.stdout.close()
        assert (left.stderr.read(), left.wait()) == (b"", 0)


@pytest.mark.parametrize(("line", "said"), CASES["unknown"])
def test_an_unknown_command_is_a_usage_error(line, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    assert ended.value.code == 2
    assert said in printed(capsys)[1]


@pytest.mark.parametrize(("line", "status", "said"), CASES["failing"])
def test_what_cannot_be_done_is_one_line_and_the_exit_status(line, status, said, capsys):
    no_log = str(ROOT / "pyproject.toml")
    command, *arguments = line.replace("NOWHERE", NO_DAEMON).replace("NO_LOG", no_log).split()
    assert main([command, *arguments]) == status
    out, err = printed(capsys)
    assert out == ""
    assert err.startswith(f"warpwatch {command}: ")
    assert said.replace("NOWHERE", NO_DAEMON) in err
    assert err.count("\n") == 1
    # Python's own way with a closed pipe is only given up for the program that is started.
    assert signal.getsignal(signal.SIGPIPE) == signal.SIG_IGN


def leaves(tree: Any) -> int:
    return sum(map(leaves, tree.values())) if isinstance(tree, dict) and tree else 1


def test_the_configuration_in_force_and_the_catalogue_of_metrics_are_printed(
    capsys, tmp_path, monkeypatch
):
    assert main(["config", "show", "--json"]) == 0
    shown = json.loads(printed(capsys)[0])
    assert shown["http"]["listen"] == "127.0.0.1:9400"
    assert leaves(shown) <= 75
    file = tmp_path / "warpwatch.yaml"
    file.write_text(
        "triggers: {recipes: {hang: null, gc_pause: {steps: 5}, straggler: {steps: 9}}}"
    )
    monkeypatch.setenv("WARPWATCH_CONFIG", str(file))
    assert main(["config", "show", "--json"]) == 0
    found = json.loads(printed(capsys)[0])["triggers"]["recipes"]
    assert (found.keys(), found["hang"]) == ({"hang", "straggler"}, None)
    assert main(["config", "show", str(file), "--all", "--json"]) == 0
    assert "step_drift" in json.loads(printed(capsys)[0])["triggers"]["recipes"]
    assert main(["metrics", "--json"]) == 0
    names = {row["name"] for row in json.loads(printed(capsys)[0])}
    assert {"warpwatch_device_up", "warpwatch_step_duration_seconds"} <= names


def test_the_copy_is_loaded_by_the_path_that_is_printed(tmp_path, capsys):
    assert main(["shim", str(tmp_path)]) == 0
    path = capsys.readouterr().out.strip()
    assert path == str(tmp_path / "warpwatch/bootstrap")
    environment = {**os.environ, "PYTHONPATH": path, "WARPWATCH": "1"}
    code = "import sitecustomize; print(sitecustomize.__file__)"
    # -S -s: nothing that is installed here is seen, so the copy alone must do.
    done = subprocess.run(
        [sys.executable, "-S", "-s", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"{path}/sitecustomize.py", done.stderr
    assert not list(tmp_path.rglob("__pycache__/*.cpython-*.opt-*"))
    # It can be copied again.
    assert main(["shim", str(tmp_path)]) == 0
