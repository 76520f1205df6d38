"""Targets of a fleet: lists, files, names, and the output of ``examples/slurm``."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from tests.cases import cases
from tests.waiting import DEADLINE_S
from warpwatch_daemon import cli
from warpwatch_fleet.config import FleetConfig, FleetFile
from warpwatch_fleet.targets import Target, Targets
from warpwatch_runtime.loading import load

SLURM = Path(__file__).resolve().parents[2] / "examples" / "slurm"
CASES = cases(__file__)


def write(path: Path, *targets: str, **labels: str) -> None:
    path.write_text(json.dumps([{"targets": targets, "labels": labels}]))


def targets_of(*files: Path, **config: Any) -> Targets:
    return Targets(FleetConfig(targets_files=files, **config))


def test_a_list_and_files_together_are_the_targets_with_the_labels_of_the_first(tmp_path):
    folder = tmp_path / "[x]"
    folder.mkdir()
    path = folder / "a.json"
    write(path, "gpu-2:9400", owner="ns/team")
    (folder / "b.yaml").write_text("- targets: [gpu-3:9400, gpu-1:9400, gpu-2:9400]\n")
    targets = targets_of(folder / "*.*", targets=("gpu-1:9400",))
    names = ("gpu-1:9400", "gpu-2:9400", "gpu-3:9400")
    assert targets.read() == {name: Target(name) for name in names}
    assert [targets.read()[name].owner for name in names] == [None, "ns/team", None]
    # A file is read again, and one that goes takes its targets with it.
    write(path, "gpu-4:9400")
    assert "gpu-4:9400" in targets.read()
    path.unlink()
    assert "gpu-4:9400" not in targets.read()
    path.write_text("[")
    assert ({*targets.read()}, len(targets.failing)) == ({*names}, 1)
    path.unlink()
    assert ({*targets.read()}, targets.failing) == ({*names}, ())
    many = targets_of(targets=tuple(f"gpu-{number}:9400" for number in range(8193)))
    assert len(many.read()) == 8192


def test_a_file_with_a_mistake_is_refused_whole_and_what_it_gave_before_stays(
    tmp_path, golden_case
):
    path, lines = tmp_path / "nodes.json", []
    targets = targets_of(path)
    for groups in CASES["groups"]:
        write(path, "gpu-9:9400")
        targets.read()
        path.write_text(json.dumps(groups))
        assert set(targets.read()) == {"gpu-9:9400"}
        lines += [f"{groups}\n    {one}\n".replace(str(tmp_path), "") for one in targets.failing]
    golden_case("".join(lines))
    write(path)
    assert (targets.read(), targets.failing) == ({}, ())


def test_a_mistake_in_the_section_is_one_line_and_exit_2(tmp_path, capsys, golden_case):
    lines = []
    for text, *options in CASES["mistakes"]:
        (tmp_path / "fleet.yaml").write_text(text)
        assert cli.main(["fleet", "--config", str(tmp_path / "fleet.yaml"), *options]) == 2
        said = capsys.readouterr().err.replace(str(tmp_path), "")
        assert said.count("\n") == 1
        lines.append(f"{' '.join((text, *options))}\n    {said}")
    golden_case("".join(lines))


def test_every_address_of_a_name_is_a_target_that_is_verified_for_the_name():
    found = targets_of(targets_dns="localhost:9400").read()
    assert found.keys() & {"127.0.0.1:9400", "[::1]:9400"}
    assert {target.server_name for target in found.values()} == {"localhost"}
    (numeric,) = targets_of(targets_dns="[::1]:9400").read().values()
    assert (numeric.address, numeric.server_name) == ("[::1]:9400", "::1")
    for name in ("no-such-host.invalid:9400", f"{64 * 'x'}:9400"):
        missing = targets_of(targets_dns=name)
        assert missing.read() == {}
        assert missing.failing[0].startswith(f"{name}: ")


# --- examples/slurm ---


def ask_slurm(folder: Path, sinfo: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run the example's script under a ``sinfo`` that says what Slurm's does."""
    command = folder / "sinfo"
    command.write_text("#!/bin/bash\n" + sinfo)
    command.chmod(0o755)
    return subprocess.run(
        [SLURM / "fleet-targets.sh", folder / "slurm.json", "9500"],
        env=os.environ | {"PATH": f"{folder}:{os.environ['PATH']}"} | env,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )


def test_every_powered_node_of_slurm_with_gpus_is_a_target_once_and_stays(tmp_path):
    (tmp_path / "said").write_text(CASES["sinfo"])
    asked, written = tmp_path / "asked", tmp_path / "slurm.json"
    ended = ask_slurm(tmp_path, f'echo "$@" > {asked}\ncat {tmp_path / "said"}\n')
    assert (ended.returncode, ended.stderr) == (0, "")
    assert asked.read_text() == "--noheader --Node --format=%n %T %G\n"
    hosts = ["gpu-001", "gpu-002", "gpu-010", "gpu-011", "gpu-014"]
    assert [*targets_of(written).read()] == [f"{host}:9500" for host in hosts]
    assert ask_slurm(tmp_path, f"cat {tmp_path / 'said'}\n", GRES="").returncode == 0
    assert len(targets_of(written).read()) == len(hosts) + 2
    before = written.read_text()
    for sinfo in ("exit 1\n", "echo slurmctld is away >&2\nexit 1\n", "exit 0\n"):
        assert ask_slurm(tmp_path, sinfo).returncode != 0
        assert written.read_text() == before
    assert sorted(path.name for path in tmp_path.glob("s*")) == ["said", "sinfo", "slurm.json"]
    assert load(FleetFile, SLURM / "fleet.yaml").fleet.targets_files
