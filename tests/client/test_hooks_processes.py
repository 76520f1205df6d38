"""Which processes become ranks under ``run``: those that train, however they were started."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
import textwrap
import venv
from pathlib import Path

import pytest

from tests.client.daemon_side import Folder
from warpwatch.hooks import HOOKS
from warpwatch.launch import BOOTSTRAP

pytestmark = pytest.mark.torch

TRAIN = """
import os, sys, time, torch

def train(rank=0, data=None):
    os.environ["RANK"] = str(rank)
    torch.set_num_threads(1)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in data or [torch.ones(4, 8)] * 20:
        model(batch).sum().backward()
        optimizer.step()
        time.sleep(0.01)
"""

# One rank, and around it all that is none, though some of it computes gradients as well.
ONE_RANK = """
import subprocess
from torch.utils.data import DataLoader, Dataset

class Adversarial(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        x = torch.ones(8, requires_grad=True)
        x.square().sum().backward()
        return x.grad

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        loader = DataLoader(Adversarial(), 4, num_workers=1, multiprocessing_context=method)
        train(0, loader)
    load = "import torch; list(torch.utils.data.DataLoader(torch.ones(4, 8))); print('loaded')"
    subprocess.run([sys.executable, "-c", load], check=True)
    child = os.fork()
    if child == 0:
        train(1)
        os._exit(0)
    sys.exit(os.waitpid(child, 0)[1])
"""

# Ranks whose parent is none.
THREE_RANKS = """
import torch.multiprocessing as processes

if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        processes.start_processes(train, (), 1, start_method=method)
    print("started")
"""


def run(folder: Folder, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "warpwatch", "run", "--job", "j", "--", *command],
        env=folder.environment(**environ),
        capture_output=True,
        text=True,
        timeout=90,
    )


def script(folder: Path, code: str = "train()") -> Path:
    path = folder / "script.py"
    path.write_text(TRAIN + textwrap.dedent(code))
    return path


def ranks(folder: Folder) -> list[tuple[int, int, str]]:
    return sorted(
        (ring.metadata["rank"], ring.header.totals.steps, ring.metadata["step_clock"])
        for ring in folder.rings()
    )


def test_hooks_are_installed_once_and_the_flow_is_the_process_own(folder: Folder) -> None:
    code = (
        "import sys, torch\n"
        "from warpwatch import hooks\n"
        "finders = list(sys.meta_path)\n"
        "state = hooks.install()\n"
        "print(hooks.install() is state, sys.meta_path == finders, state.off)"
    )
    assert run(folder, sys.executable, "-c", code).stdout == "True True False\n"


def test_the_bootstrap_waits_for_every_library_with_hooks() -> None:
    tree = ast.parse((BOOTSTRAP / "sitecustomize.py").read_text())
    (libraries,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LIBRARIES"
    )
    assert {hook.module.partition(".")[0] for hook in HOOKS} <= set(libraries)


def test_a_program_that_trains_nothing_imports_nothing_of_ours(folder: Folder) -> None:
    code = "import json, sys; print([name for name in sys.modules if 'warpwatch' in name])"
    assert run(folder, sys.executable, "-c", code).stdout == "[]\n"


def test_workers_children_and_subprocesses_of_a_rank_are_none(
    folder: Folder, tmp_path: Path
) -> None:
    done = run(folder, sys.executable, "-W", "ignore", str(script(tmp_path, ONE_RANK)))
    assert (done.stdout, done.stderr, done.returncode) == ("loaded\n", "", 0)
    assert ranks(folder) == [(0, 30, "optimizer")]


def test_processes_that_train_are_ranks_however_they_start(folder: Folder, tmp_path: Path) -> None:
    done = run(folder, sys.executable, "-W", "ignore", str(script(tmp_path, THREE_RANKS)))
    assert (done.stdout, done.stderr, done.returncode) == ("started\n", "", 0)
    assert ranks(folder) == [(0, 20, "optimizer")] * 3


def test_a_module_run_from_another_environment_is_a_rank(folder: Folder, tmp_path: Path) -> None:
    """A virtual environment that has torch, and no shim of its own."""
    script(tmp_path)
    venv.create(tmp_path / "env", symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = tmp_path / "env" / "lib" / version / "site-packages"
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib"))
    python = str(tmp_path / "env" / "bin" / "python")
    has = subprocess.run(
        [python, "-E", "-c", "import importlib.util as u; print(u.find_spec('warpwatch'))"],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert has.stdout == "None\n"
    done = run(folder, python, "-m", "script", PYTHONPATH=str(tmp_path))
    assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)
    assert ranks(folder) == [(0, 20, "optimizer")]


def test_a_cell_of_a_notebook_is_a_rank(folder: Folder, tmp_path: Path) -> None:
    """As in a kernel: the main thread runs cells of IPython's shell, torch comes with the first."""
    pytest.importorskip("IPython", reason="IPython is not installed")
    cells = f"""
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance()
        for cell in ({TRAIN!r}, "train()", "train()"):
            shell.run_cell(cell).raise_error()
        """
    path = tmp_path / "kernel.py"
    path.write_text(textwrap.dedent(cells))
    done = run(folder, sys.executable, str(path), IPYTHONDIR=str(tmp_path), HOME=str(tmp_path))
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
    assert ranks(folder) == [(0, 40, "optimizer")]
