"""`run`: programs with the hooks and without a change."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.client.daemon_side import ROOT, Folder
from warpwatch import launch

TRAIN = """
import sys, time, torch
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
generator = torch.optim.SGD(model.parameters(), lr=0.01)
other = torch.optim.SGD(model.parameters(), lr=0.01)

class Slow(TensorDataset):
    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)

data = DataLoader(Slow(torch.randn(160, 8)), batch_size=4, num_workers=int(sys.argv[1]))
for (batch,) in data:
    model(batch).sum().backward()
    generator.step()
    other.step()
    time.sleep(0.005)
print("done", "warpwatch" in sys.modules)
"""


def run(folder: Folder, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "warpwatch", "run", *arguments],
        env=folder.environment(**environ),
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.torch
@pytest.mark.parametrize("workers", ["0", "2"])
def test_an_unchanged_program_reports_steps_and_waiting(folder: Folder, workers: str) -> None:
    done = run(folder, "--job", "plain", "--", sys.executable, "-c", TRAIN, workers)
    assert (done.stdout, done.stderr, done.returncode) == ("done True\n", "", 0)
    ring = folder.ring()
    assert (ring.metadata["job"], ring.metadata["step_clock"]) == ("plain", "optimizer")
    # The step now running began when the fortieth ended.
    assert ring.header.totals.steps == 40
    assert sorted(ring.metadata["phases"]) == ["backward", "data_wait", "forward", "optimizer"]
    waited_ns = ring.header.totals.phases_ns[ring.metadata["phases"].index("data_wait")]
    if workers == "0":
        # 39 batches of 4 items of 1 ms; the first came before the first step.
        assert 39 * 4e6 <= waited_ns < ring.header.totals.duration_ns


@pytest.mark.torch
def test_the_users_own_steps_win(folder: Folder) -> None:
    own = "import warpwatch\nmonitor = warpwatch.attach(job='own')\n"
    loop = "for (batch,) in data:"
    code = TRAIN.replace(loop, f"{own}{loop}\n  with monitor.step():")
    done = run(folder, "--", sys.executable, "-c", code, "0")
    assert (done.stdout, done.stderr) == ("done True\n", "")
    ring = folder.ring()
    assert (ring.metadata["job"], ring.metadata["step_clock"]) == ("own", "step()")
    assert ring.header.totals.steps == 40


def test_status_and_signal_are_the_programs_own(folder: Folder) -> None:
    assert run(folder, "--", sys.executable, "-c", "raise SystemExit(7)").returncode == 7
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert run(folder, "--", sys.executable, "-c", code).returncode == -15


def test_a_program_without_torch_is_left_as_it_is(folder: Folder) -> None:
    code = (
        "import sys, threading\n"
        "print('torch' in sys.modules, threading.active_count(), len(sys.meta_path))"
    )
    done = run(folder, "--", sys.executable, "-c", code)
    bare = subprocess.run([sys.executable, "-c", "import sys; print(len(sys.meta_path))"],
        capture_output=True, text=True, timeout=60)  # fmt: skip
    assert done.stdout == f"False 1 {int(bare.stdout) + 1}\n"
    assert folder.rings() == []


def test_a_sitecustomize_that_is_hidden_runs_too(folder: Folder, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('mine', __file__)\n")
    done = run(folder, "--", sys.executable, "-c", "import sitecustomize", PYTHONPATH=str(tmp_path))
    # Once in the launcher, which is a Python program as well, and once in the program.
    assert done.stdout == 2 * f"mine {tmp_path / 'sitecustomize.py'}\n"


def test_another_interpreter_borrows_this_copy(folder: Folder) -> None:
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


def test_switched_off_means_no_bootstrap() -> None:
    off = launch.environment({"WARPWATCH_JOB": "a"}, {"WARPWATCH": "0", "PYTHONPATH": "/x"})
    assert off == {"WARPWATCH": "0", "PYTHONPATH": "/x", "WARPWATCH_JOB": "a"}
    on = launch.environment({}, {"PYTHONPATH": "/x"})
    assert on == {"WARPWATCH": "1", "PYTHONPATH": f"{launch.BOOTSTRAP}{os.pathsep}/x"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "no command to run, give it after --: -- python train.py"),
        (["--"], "no command to run, give it after --: -- python train.py"),
        (["--jobs", "x", "--", "true"], "unknown option --jobs, there is only --job NAME"),
        (["--job=", "--", "true"], "--job needs a name"),
        (["--job", "--", "true"], "--job needs a name"),
        (["--", "no-such-command"], "no-such-command: No such file or directory"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_status_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main(arguments) == 2
    assert capsys.readouterr().err == f"python -m warpwatch run: {line}\n"
