"""The house: packages on floors, plain imports that point downwards only, and no circle."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.cases import cases

ROOT = Path(__file__).resolve().parents[1]
# The packages that each package may import, besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "warpwatch": set(), "warpwatch_telemetry": set(), "warpwatch_diagnosis": set(),
    "warpwatch_runtime": {"warpwatch_telemetry"}, "warpwatch_detection": {"warpwatch_telemetry"},
    "warpwatch_dashboards": {"warpwatch_telemetry"},
    "warpwatch_devices": {"warpwatch_runtime", "warpwatch_telemetry"},
    "warpwatch_exporters": {"warpwatch_runtime", "warpwatch_telemetry"},
}  # fmt: skip
_BELOW = set(MAY_IMPORT)
MAY_IMPORT |= {"warpwatch_serving": _BELOW, "warpwatch_capturing": _BELOW}
MAY_IMPORT |= {
    "warpwatch_daemon": set(MAY_IMPORT),
    "warpwatch_fleet": set(MAY_IMPORT) - {"warpwatch_devices", "warpwatch_dashboards"},
}
# Others need the protocol of the client, and `warpwatch run` needs the launcher.
CLIENT_FOR_OTHERS = {
    "warpwatch._version", "warpwatch.identity", "warpwatch.launch", "warpwatch.protocol",
    "warpwatch.rendezvous",
}  # fmt: skip
# The demo's training program is a user of the shim.
SHIM_USER = "warpwatch_daemon.demo.training"

CLOCKS = re.compile(r"(sleep|monotonic|time|perf_counter|thread_time|process_time)(_ns)?")

Graph = dict[str, set[str]]


def folder(package: str) -> Path:
    """``warpwatch_daemon`` lies in daemon/, the client's package in client/."""
    return ROOT / (package.partition("_")[2] or "client")


def modules() -> dict[str, Path]:
    """Every module by its name; a package is its __init__.py."""
    found = {}
    for package in MAY_IMPORT:
        for path in (folder(package) / package).rglob("*.py"):
            name = ".".join(path.relative_to(folder(package)).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


def nodes(path: Path) -> Iterator[ast.AST]:
    return ast.walk(ast.parse(path.read_text()))


def imported(statements: Iterable[ast.AST], known: Iterable[str] = ()) -> Iterator[str]:
    for node in statements:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in known else node.module


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Return our modules' imports of each other, wherever in a file they are."""
    known = modules()
    return {
        name: {other for other in imported(nodes(path), known) if other in known and other != name}
        for name, path in known.items()
    }


def circle(graph: Graph) -> list[str]:
    """Return one circle of the graph, as the names on it; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def between_folders(graph: Graph, inside: str) -> Graph:
    """The arrows between what lies directly in the package ``inside``: modules and packages.

    A package's own face (its __init__.py) belongs to the package.
    """
    depth = inside.count(".") + 2
    rooms: Graph = {}
    for name, others in graph.items():
        room = ".".join(name.split(".")[:depth])
        if not name.startswith(f"{inside}."):
            continue
        inner = {".".join(other.split(".")[:depth]) for other in others if other != inside}
        rooms.setdefault(room, set()).update(
            other for other in inner if other.startswith(f"{inside}.") and other != room
        )
    return {room: others & rooms.keys() for room, others in rooms.items()}


def test_an_arrow_back_up_between_folders_is_seen() -> None:
    graph: Graph = {"p.low.a": {"p.high.b"}, "p.high.b": set(), "p.high.c": {"p.low.a"}}
    assert circle(graph) == []
    assert set(circle(between_folders(graph, "p"))) == {"p.high", "p.low"}


def test_every_package_is_in_a_wheel() -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = pyproject["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {f"{folder(package).name}/{package}" for package in MAY_IMPORT}
    assert set(wheel["dev-mode-dirs"]) == {Path(package).parts[0] for package in packages}
    assert set(wheel["packages"]) == packages - {"client/warpwatch"}
    found = {
        path.parent.relative_to(ROOT).as_posix() for path in ROOT.glob("*/warpwatch*/py.typed")
    }
    # The chart's link to the dashboards leads to none.
    assert found == packages


def test_every_folder_with_code_is_an_ordinary_package() -> None:
    # sitecustomize is found by its folder on the path, not as a module of ours.
    folders = {path.parent for path in modules().values() if path.parent.name != "bootstrap"}
    assert [path for path in folders if not (path / "__init__.py").exists()] == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_between_packages_point_downwards(package: str, graph: Graph) -> None:
    for name, others in graph.items():
        if name.split(".")[0] != package:
            continue
        tops = {other.split(".")[0] for other in others} - {package}
        assert tops <= MAY_IMPORT[package], name


def test_of_the_client_others_import_the_protocol_only(graph: Graph) -> None:
    for name, others in graph.items():
        if name.startswith("warpwatch_") and name != SHIM_USER:
            shim = {other for other in others if other.split(".")[0] == "warpwatch"}
            assert shim <= CLIENT_FOR_OTHERS, name


def test_no_modules_import_each_other_in_a_circle(graph: Graph) -> None:
    assert circle(graph) == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_inside_of_a_package_point_downwards(package: str, graph: Graph) -> None:
    inner = [name for name in graph if any(other.startswith(f"{name}.") for other in graph)]
    for name in inner:
        if name.split(".")[0] == package:
            assert circle(between_folders(graph, name)) == [], name


def clock_lines(path: Path) -> Iterator[int]:
    """Yield the lines that use a clock or sleep of ``time``, but for texts of programs."""
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "time" and CLOCKS.fullmatch(node.attr):
                yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield node.lineno


def test_only_the_listed_tests_sleep_or_read_a_clock() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): next(clock_lines(path), 0)
        for path in sorted((ROOT / "tests").rglob("*.py"))
    }
    listed = cases(__file__)["read_clocks"]
    assert {path: line for path, line in found.items() if line and path not in listed} == {}
    assert [path for path in listed if not found.get(path)] == [], "listed without need"


def test_no_test_module_imports_another() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = {name for name in imported(nodes(path)) if name.startswith("tests.")}
        assert not any(".test_" in name for name in names), path


@pytest.mark.parametrize("package", ["warpwatch", "warpwatch_diagnosis"])
def test_only_the_standard_library_is_imported_at_the_top(package: str) -> None:
    for path in (folder(package) / package).rglob("*.py"):
        # The shim may use torch inside functions: only where the program has it already.
        top = ast.parse(path.read_text()).body
        names = {name.split(".")[0] for name in imported(top)}
        # A diagnosis decodes hundreds of megabytes of JSON, and what it keeps of them.
        msgspec = path.name in ("events.py", "reduction.py")
        known = {package, "msgspec"} if msgspec else {package}
        assert names - sys.stdlib_module_names <= known, path


def test_the_daemon_does_not_import_what_only_others_need() -> None:
    heavy = {"torch", "numpy", "jinja2", "grpc", "grafana_foundation_sdk"}
    code = "import sys, warpwatch_daemon.agent.app; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert heavy & set(done.stdout.split()) == set()
