from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from warpwatch_fleet.config import AgentsConfig, FleetConfig, ShardConfig
from warpwatch_fleet.targets import Target, Targets


def write(path: Path, groups: Any) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(groups))
    part.replace(path)


def targets_of(*files: Path, **config: Any) -> Targets:
    return Targets(FleetConfig(targets_files=files, **config))


def test_a_list_and_files_together_are_the_targets_with_the_labels_of_the_first(tmp_path):
    write(tmp_path / "a.json", [{"targets": ["gpu-2:9400"], "labels": {"owner": "ns/team"}}])
    (tmp_path / "b.yaml").write_text("- targets: [gpu-3:9400, gpu-1:9400]\n")
    targets = targets_of(tmp_path / "*.*", targets=("gpu-1:9400",))
    assert targets.read() == {
        "gpu-1:9400": Target("gpu-1:9400"),
        "gpu-2:9400": Target("gpu-2:9400"),
        "gpu-3:9400": Target("gpu-3:9400"),
    }
    assert targets.read()["gpu-2:9400"].owner == "ns/team"


def test_a_file_is_read_again_and_one_that_goes_takes_its_targets_with_it(tmp_path):
    path = tmp_path / "nodes.json"
    targets = targets_of(tmp_path / "*.json")
    write(path, [{"targets": ["gpu-1:9400"]}])
    assert set(targets.read()) == {"gpu-1:9400"}
    write(path, [{"targets": ["gpu-2:9400"]}])
    assert set(targets.read()) == {"gpu-2:9400"}
    path.unlink()
    assert targets.read() == {}


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ({"targets": []}, "a list is needed"),
        ([{"targets": ["gpu-1"]}], "'gpu-1' is no target"),
        ([{"targets": ["gpu-1:9400"], "label": {}}], "the keys targets and labels, and no other"),
        ([{"targets": ["gpu-1:9400"], "labels": {"rack": 7}}], "must be a text"),
    ],
)
def test_a_file_with_a_mistake_is_refused_whole_and_what_it_gave_before_stays(
    tmp_path, groups, said
):
    path = tmp_path / "nodes.json"
    targets = targets_of(path)
    write(path, [{"targets": ["gpu-9:9400"]}])
    targets.read()
    write(path, groups)
    assert set(targets.read()) == {"gpu-9:9400"}
    (failing,) = targets.failing
    assert said in failing
    assert failing.startswith(str(path))
    write(path, [])
    assert targets.read() == {}
    assert targets.failing == ()


def test_every_address_of_a_name_is_a_target(tmp_path):
    assert set(targets_of(targets_dns="localhost:9400").read()) & {
        "127.0.0.1:9400",
        "[::1]:9400",
    }
    missing = targets_of(targets_dns="no-such-host.invalid:9400")
    assert missing.read() == {}
    assert missing.failing[0].startswith("no-such-host.invalid:9400: ")


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (lambda: ShardConfig(index=2, of=2), "there is no 2 of 2"),
        (lambda: AgentsConfig(token_file=Path("t")), "in plain text"),
        (lambda: AgentsConfig(cert_file=Path("c")), "cert_file and key_file"),
        (lambda: FleetConfig(targets=("gpu-1",)), "targets"),
    ],
)
def test_a_mistake_in_the_section_is_named(section, said):
    with pytest.raises(ValidationError, match=said):
        section()
