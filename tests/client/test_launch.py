"""`run`: programs become ranks without a change, and others stay as they are.

Programs that train become ranks, however they were started.
"""

import ast
import signal
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.cases import cases as tables
from tests.client.daemon_side import Folder
from tests.client.fork_server import ROOT
from tests.waiting import DEADLINE_S
from warpwatch import launch
from warpwatch.hooks import HOOKS

PROGRAMS = tables(__file__)


def run(folder: Folder, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "warpwatch", "run", *arguments],
        env=folder.environment(**environ),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def ranks(folder: Folder) -> list[tuple[int, int, str]]:
    return sorted(
        (ring.metadata["rank"], ring.header.totals.steps, ring.metadata["step_clock"])
        for ring in folder.rings()
    )


@pytest.mark.torch
def test_an_unchanged_program_reports_steps_and_waiting(folder):
    done = run(
        folder,
        "--job",
        "plain",
        "--",
        sys.executable,
        "-c",
        PROGRAMS["train"] + PROGRAMS["slow_data"],
    )
    assert (done.stdout, done.stderr, done.returncode) == ("done True\n", "", 0)
    ring = folder.ring()
    assert (ring.metadata["job"], ring.metadata["step_clock"]) == ("plain", "optimizer")
    # The step now running began when the fortieth ended.
    assert ring.header.totals.steps == 40
    assert sorted(ring.metadata["phases"]) == ["backward", "data_wait", "forward", "optimizer"]
    waited_ns = ring.header.totals.phases_ns[ring.metadata["phases"].index("data_wait")]
    # 39 batches of 4 items of 1 ms; the first came before the first step.
    assert 39 * 4e6 <= waited_ns < ring.header.totals.duration_ns


@pytest.mark.torch
def test_processes_that_train_are_ranks_their_workers_not(folder, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAMS["train"] + PROGRAMS["processes"])
    names = "optimizer, backward,dataloader, dataloder"
    done = run(folder, "--", sys.executable, "-W", "ignore", str(script), WARPWATCH_HOOKS=names)
    # The hooks are installed once, and finder and state are the process's own. One has no hook.
    expected = ("True True 1\n", "", 0)
    assert (done.stdout, done.stderr, done.returncode) == expected
    assert ranks(folder) == [(0, 20, "optimizer")] * 3


@pytest.mark.torch
def test_a_module_in_another_environment_is_a_rank(folder, tmp_path):
    """The virtual environment has torch, and no shim of its own."""
    (tmp_path / "kernel.py").write_text(f"{PROGRAMS['train']}\ntrain()\ntrain()\n")
    venv.create(tmp_path / "env", symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "env" / "lib" / version / "site-packages"
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    python = str(tmp_path / "env" / "bin" / "python")
    find = "import importlib.util as u; print(u.find_spec('warpwatch'))"
    has = subprocess.run([python, "-E", "-c", find], capture_output=True, text=True, check=True)
    assert has.stdout == "None\n"
    done = run(folder, "--", python, "-m", "kernel", PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
    assert ranks(folder) == [(0, 40, "optimizer")]


def test_the_bootstrap_waits_for_every_library_with_hooks():
    tree = ast.parse((launch.BOOTSTRAP / "sitecustomize.py").read_text())
    (libraries,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LIBRARIES"
    )
    assert {hook.module.partition(".")[0] for hook in HOOKS} <= set(libraries)


def test_status_and_signal_are_the_programs_own(folder):
    assert run(folder, "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert run(folder, "--", sys.executable, "-c", code).returncode == -15
    # Python ignores two signals; the program starts as from a shell.
    command = ["grep", "SigIgn", "/proc/self/status"]
    alone = subprocess.run(command, capture_output=True, text=True).stdout
    assert run(folder, "--", *command).stdout == alone
    shim = [sys.executable, "-m", "warpwatch"]
    found = subprocess.run([*shim, "walk"], capture_output=True)
    assert (found.returncode, found.stdout, b"the command is run" in found.stderr) == (2, b"", True)
    found = subprocess.run([*shim, "--help"], capture_output=True)
    assert (found.returncode, b"usage: python -m warpwatch run" in found.stdout) == (0, True)


def test_a_program_without_torch_is_left_as_it_is(folder):
    code = (
        "import sys, threading\n"
        "print(threading.active_count(), len(sys.meta_path),"
        " [name for name in sys.modules if 'warpwatch' in name or name == 'torch'])"
    )
    done = run(folder, "--", sys.executable, "-c", code)
    bare = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    finders = int(bare.stdout.split()[1])
    assert (bare.stdout, done.stdout) == (f"1 {finders} []\n", f"1 {finders + 1} []\n")
    assert folder.rings() == []


def test_a_sitecustomize_that_is_hidden_runs_too(folder, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("print('mine', __file__)\n")
    done = run(folder, "--", sys.executable, "-c", "import sitecustomize", PYTHONPATH=str(tmp_path))
    # Once in the launcher, which is a Python program as well, and once in the program.
    assert done.stdout == 2 * f"mine {tmp_path / 'sitecustomize.py'}\n"


def test_another_interpreter_borrows_this_copy(folder):
    code = (
        "import contextlib, sys\n"
        "with contextlib.suppress(ImportError): import torch\n"
        "import warpwatch.captures\n"
        f"print('warpwatch.hooks' in sys.modules, {str(ROOT / 'client')!r} in sys.path)"
    )
    # Isolated from the site-packages in which this copy is known.
    python = Path(sys.executable).resolve()
    done = run(folder, "--", str(python), "-s", "-c", code)
    assert (done.stdout, done.stderr) == ("True False\n", "")


def test_a_wrong_line_is_status_2_with_what_is_wrong(capsys, cases):
    def said(line: str) -> str:
        assert launch.main(line.split()) == 2
        text: str = capsys.readouterr().err
        return text.removesuffix("\n")

    handlers = [signal.getsignal(one) for one in (signal.SIGPIPE, signal.SIGXFSZ)]
    cases("client/wrong_lines.txt", said)
    assert handlers == [signal.getsignal(one) for one in (signal.SIGPIPE, signal.SIGXFSZ)]
