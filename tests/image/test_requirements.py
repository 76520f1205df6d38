"""The parts of the image: every distribution with its version and the hashes of its wheels."""

import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.waiting import DEADLINE_S

ROOT = Path(__file__).resolve().parents[2]
IMAGE = ROOT / "requirements-image.txt"
BUILD = ROOT / "requirements-build.txt"
_ENTRY = re.compile(
    r"^([a-z0-9-]+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE
)


def entries(file: Path) -> dict[str, tuple[str, list[str]]]:
    """Version and hashes by name."""
    found = _ENTRY.findall(file.read_text())
    return {name: (version, re.findall("[0-9a-f]{64}", lines)) for name, version, lines in found}


@pytest.mark.parametrize("file", [IMAGE, BUILD], ids=lambda file: file.name)
def test_every_line_is_a_version_with_hashes_and_names_no_index(file: Path) -> None:
    left = _ENTRY.sub("", file.read_text())
    assert [line for line in left.splitlines() if line and line[0] != "#"] == []
    assert "://" not in file.read_text()


def test_every_dependency_has_a_version_of_its_own() -> None:
    """The dependencies of dependencies count too: else two builds of one commit differ."""
    pins = entries(IMAGE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = list(project["dependencies"])
    wanted += [one for extra in ("auth", "fleet", "otlp", "remote") for one in extras[extra]]
    seen: set[str] = set()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = canonicalize_name(requirement.name)
        if name in seen or not (requirement.marker is None or requirement.marker.evaluate()):
            continue
        seen.add(name)
        # A release since then may need others in other versions.
        if importlib.metadata.version(name) == pins[name][0]:
            assert requirement.specifier.contains(pins[name][0]), requirement
        wanted += importlib.metadata.requires(name) or []
    assert seen == set(pins)


def test_what_is_compiled_has_wheels_for_each_python_and_machine() -> None:
    # A wheel a machine where it is of Python's stable interface, else one for each of four Pythons.
    stable = ("bcrypt", "obstore", "protobuf", "psutil")
    others = ("charset-normalizer", "grpcio", "markupsafe", "msgspec", "pydantic-core", "pyyaml")
    counts = {name: len(hashes) for name, (_, hashes) in entries(IMAGE).items() if len(hashes) > 1}
    assert counts == dict.fromkeys(stable, 2) | dict.fromkeys(others, 8)


def test_both_distributions_are_built_by_the_backend_that_the_image_has() -> None:
    version, _ = entries(BUILD)["hatchling"]
    for folder in (ROOT, ROOT / "client"):
        build = tomllib.loads((folder / "pyproject.toml").read_text())["build-system"]
        assert build["requires"] == [f"hatchling=={version}"]


@pytest.mark.deploy
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_an_index_has_what_the_hashes_say(machine: str, tmp_path: Path) -> None:
    """For the Python of the Dockerfile's own base; pip refuses what differs."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--only-binary=:all:", "--python-version=3.12", "--dest", str(tmp_path)]
    platforms = ("manylinux_2_28", "manylinux_2_24", "manylinux2014")
    command += [f"--platform={each}_{machine}" for each in platforms]
    done = subprocess.run(
        [*command, "--requirement", str(IMAGE)], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.iterdir())) == len(entries(IMAGE))


@pytest.mark.deploy
def test_the_bill_of_materials_names_each_with_its_hashes(tmp_path: Path) -> None:
    tool = Path(sys.executable).parent / "cyclonedx-py"
    if not tool.exists() or shutil.which("make") is None:
        pytest.skip("cyclonedx-bom or make is not installed")
    # As if everything were set up: make is not to install anything here.
    for name in (".demo", ".sbom"):
        (tmp_path / name).touch()
    bill = tmp_path / "sbom.cdx.json"
    variables = [f"VENV={tmp_path}", f"BIN={tool.parent}", f"SBOM={bill}"]
    done = subprocess.run(
        ["make", "sbom", *variables], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.returncode == 0, done.stderr
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    validator = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert validator.validate_str(bill.read_text()) is None
    document = json.loads(bill.read_text())
    assert document["metadata"]["component"]["name"] == "warpwatch"
    found = {}
    for each in document["components"]:
        hashes = [one["content"] for one in each["externalReferences"][0]["hashes"]]
        found[each["name"]] = each["version"], sorted(hashes)
    assert found == entries(IMAGE)
