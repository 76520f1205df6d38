"""``examples/slurm/fleet-targets.sh`` under a ``sinfo`` that says what Slurm's does."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from warpwatch_daemon.config.loading import load_as
from warpwatch_fleet.config import FleetConfig, FleetFile
from warpwatch_fleet.targets import Targets

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "slurm"
# As `sinfo --noheader --Node --format='%n %T'` prints it: a line for each node and partition, with
# the flags of states (* no answer, ~ powered down, $ reserved, @ about to reboot).
NODES = """\
gpu-001 mixed
gpu-001 mixed
gpu-002 allocated
gpu-010 down*
gpu-011 drained$
gpu-012 idle~
gpu-013 future
gpu-014 idle@
login-1 idle
"""


def write(folder: Path, sinfo: str) -> subprocess.CompletedProcess[str]:
    command = folder / "sinfo"
    command.write_text("#!/bin/bash\n" + sinfo)
    command.chmod(0o755)
    return subprocess.run(
        [EXAMPLES / "fleet-targets.sh", folder / "slurm.json", "9500"],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )


def addresses(folder: Path) -> list[str]:
    return [*Targets(FleetConfig(targets_files=(folder / "*.json",))).read()]


def test_every_powered_node_is_a_target_once(tmp_path: Path) -> None:
    (tmp_path / "said").write_text(NODES)
    asked = tmp_path / "asked"
    ended = write(tmp_path, f'echo "$@" > {asked}\ncat {tmp_path / "said"}\n')
    assert (ended.returncode, ended.stderr) == (0, "")
    assert asked.read_text() == "--noheader --Node --format=%n %T\n"
    hosts = ["gpu-001", "gpu-002", "gpu-010", "gpu-011", "gpu-014", "login-1"]
    assert addresses(tmp_path) == [f"{host}:9500" for host in hosts]


@pytest.mark.parametrize("sinfo", ["exit 1\n", "echo slurmctld is away >&2\nexit 1\n", "exit 0\n"])
def test_without_an_answer_the_targets_stay(tmp_path: Path, sinfo: str) -> None:
    assert write(tmp_path, "echo gpu-001 idle\n").returncode == 0
    before = (tmp_path / "slurm.json").read_text()
    assert write(tmp_path, sinfo).returncode != 0
    assert (tmp_path / "slurm.json").read_text() == before
    assert addresses(tmp_path) == ["gpu-001:9500"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["sinfo", "slurm.json"]


def test_the_fleet_s_configuration_can_be_read() -> None:
    assert load_as(FleetFile, EXAMPLES / "fleet.yaml").fleet.targets_files
