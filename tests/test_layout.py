"""The rules that keep the namespace package and the layering whole."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "client": {"client"},
    "telemetry": {"telemetry"},
    "diagnosis": {"diagnosis"},
    "exporters": {"exporters", "telemetry"},
    "dashboards": {"dashboards", "telemetry"},
    "daemon": {"client", "daemon", "dashboards", "diagnosis", "exporters", "telemetry"},
}
# Of the client the daemon needs the protocol, and the launcher for its `run` command.
CLIENT_FOR_DAEMON = {
    "warpwatch._version",
    "warpwatch.identity",
    "warpwatch.launch",
    "warpwatch.protocol",
    "warpwatch.rendezvous",
}
# The demo's training program is a user of the shim.
SHIM_USERS = {ROOT / "daemon/warpwatch_daemon/demo/training.py"}


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found = [name for name in submodules if is_module(name)]
            yield from found or [node.module]


def is_module(name: str) -> bool:
    top, *rest = name.split(".")
    if top != "warpwatch" or len(rest) < 2:
        return False
    path = ROOT / rest[0] / Path(*name.split("."))
    return path.with_suffix(".py").is_file() or path.is_dir()


def test_every_part_is_packaged() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    found = ROOT.glob("*/warpwatch/*/__init__.py")
    # The chart's link to the dashboards is none.
    parts = {path.parts[-4] for path in found if not path.parent.is_symlink()}
    assert parts == set(MAY_IMPORT)
    assert set(wheel["dev-mode-dirs"]) == parts
    assert {Path(package).parts[0] for package in wheel["packages"]} == parts - {"client"}


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_namespace_has_no_init(part: str) -> None:
    assert not (ROOT / part / "warpwatch" / "__init__.py").exists()


@pytest.mark.parametrize("part", sorted(MAY_IMPORT))
def test_imports_point_downwards(part: str) -> None:
    for path in (ROOT / part).rglob("*.py"):
        for module in imported_modules(path):
            if not module.startswith("warpwatch."):
                continue
            assert module.split(".")[1] in MAY_IMPORT[part], f"{path}: {module}"
            if part == "daemon" and module.startswith("warpwatch"):
                assert module in CLIENT_FOR_DAEMON or path in SHIM_USERS, f"{path}: {module}"


@pytest.mark.parametrize("part", ["client", "diagnosis"])
def test_imports_the_standard_library_only(part: str) -> None:
    for path in (ROOT / part).rglob("*.py"):
        tree = ast.parse(path.read_text())
        # The shim may use torch inside functions: only where the program has it already.
        tops = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = {name for node in tops for name in imported_by(node)}
        foreign = {name for name in names if name.split(".")[0] not in sys.stdlib_module_names}
        # A diagnosis decodes hundreds of megabytes of JSON, in one place.
        known = {"warpwatch", "msgspec"} if path.name == "raw_events.py" else {"warpwatch"}
        assert {name.split(".")[0] for name in foreign} <= known, f"{path}: {foreign}"


def imported_by(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""]


def test_the_daemon_does_not_import_what_only_others_need() -> None:
    heavy = {"torch", "numpy", "jinja2", "prometheus_client", "grpc"}
    code = "import sys, warpwatch_daemon.agent.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy & set(done.stdout.split()) == set()


def test_every_module_can_be_found_by_its_path() -> None:
    for part in MAY_IMPORT:
        for path in (ROOT / part / "warpwatch").rglob("*.py"):
            module = ".".join(path.relative_to(ROOT / part).with_suffix("").parts)
            module = module.removesuffix(".__init__")
            # Found by name only: importing every module would import torch.
            spec = importlib.util.find_spec(module.rsplit(".", 1)[0])
            assert spec is not None, module
