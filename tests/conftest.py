"""Fixtures of all tests: an environment without our variables, golden files, the fake driver."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import gettempdir

import pytest
from hypothesis import HealthCheck, settings

from tests.devices.fakenvml.driver import CannotBuild, FakeDriver, build
from tests.loop.other_users import open_folder
from warpwatch.rendezvous import inbox_problem

# Hypothesis draws the same examples on every machine, however slow it is.
settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("steady")

GOLDEN = Path(__file__).parent / "golden"
Cases = Callable[[str, Callable[[str], object]], None]


# Local times are the same on every machine.
os.environ["TZ"] = "UTC"
time.tzset()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite tests/golden")


def pytest_sessionstart() -> None:
    """Refuse a disk on which the shim refuses captures, as tests would wait for them."""
    if problem := inbox_problem(gettempdir()):
        reason = f"{gettempdir()}: {problem}: captures need a fifth of the disk free; set TMPDIR"
        pytest.exit(reason, returncode=2)


def pytest_xdist_auto_num_workers() -> int:
    """Return half as many workers again as cores: a third of the tests' time is waiting."""
    return len(os.sched_getaffinity(0)) * 3 // 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the loops, which wait longest: later tests compute meanwhile."""
    items.sort(key=lambda item: "tests/loop/" not in item.nodeid)


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("WARPWATCH_"):
            monkeypatch.delenv(name)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """A stack of contexts that ends with the test."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def open_path() -> Iterator[Path]:
    """Yield a folder like ``tmp_path`` that processes of other users can enter."""
    with open_folder() as folder:
        yield folder


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, bytes], None]:
    """Compare bytes with a file of tests/golden; ``--update-golden`` writes it instead.

    Pages are compared without their style and script.
    """

    def compare(name: str, actual: bytes) -> None:
        path = GOLDEN / name
        if path.suffix == ".html":
            actual = re.sub(rb"<(style|script)>.*?</\1>", b"", actual, flags=re.DOTALL)
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(actual)
        expected = path.read_bytes() if path.exists() else b""
        assert actual.decode().splitlines() == expected.decode().splitlines()

    return compare


@pytest.fixture
def golden_case(
    request: pytest.FixtureRequest, golden: Callable[[str, bytes], None]
) -> Callable[..., None]:
    """Compare a text with the golden file of this case, or of the case with the given name."""
    folder = request.path.relative_to(GOLDEN.parent).parts[0]
    spec = getattr(request.node, "callspec", None)
    case = spec.id if spec else request.node.name.removeprefix("test_")

    def compare(text: str, name: str = case) -> None:
        file = re.sub(r"\W+", "_", name, flags=re.ASCII)
        golden(f"{folder}/{request.path.stem.removeprefix('test_')}/{file}.txt", text.encode())

    return compare


@pytest.fixture
def cases(golden: Callable[[str, bytes], None]) -> Cases:
    """Compare what is made of each input in a file of tests/golden with what stands behind it.

    An input ends with ``=>``, a result with its line or, after inputs of several lines, with an
    empty line.
    """

    def compare(name: str, run: Callable[[str], object]) -> None:
        lines: list[str] = []
        begun = 0
        for line in (GOLDEN / name).read_text().splitlines():
            own, arrow, _ = line.rpartition("=> ")
            if not arrow:
                lines.append(line)
                if not line:
                    begun = len(lines)
                continue
            text = own[:-1] if own else "".join(f"{one}\n" for one in lines[begun:])
            lines.append(f"{own}=> {run(text)}")
            begun = len(lines)
        golden(name, "".join(f"{line}\n" for line in lines).encode())

    return compare


@pytest.fixture(scope="session")
def fake_nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that holds our own libnvidia-ml.so.1, built once for all workers."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    try:
        return build(shared / "fakenvml-library")
    except CannotBuild as reason:
        pytest.skip(f"no fake driver: {reason}")


@pytest.fixture(scope="session")
def nvml_driver(fake_nvml: Path, tmp_path_factory: pytest.TempPathFactory) -> FakeDriver:
    """The driver of this very process, for ``tests.devices.nvml_by_hand``."""
    return FakeDriver(fake_nvml, tmp_path_factory.mktemp("nvml-driver"))


@pytest.fixture
def fake_driver(fake_nvml: Path, tmp_path: Path) -> FakeDriver:
    """Eight H100 in order, for a child process with ``fake_driver.environment``."""
    return FakeDriver(fake_nvml, tmp_path / "fakenvml")
