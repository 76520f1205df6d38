"""The fake driver in the tests' own process, and files of inputs with what is made of each."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_by_hand import HandNvml, Stepper, nvml_by_hand

GOLDEN = Path(__file__).parents[1] / "golden"
Golden = Callable[[str, bytes], None]
Cases = Callable[[str, Callable[[str], object]], None]


@pytest.fixture
def nvml(nvml_driver: FakeDriver) -> Iterator[HandNvml]:
    with nvml_by_hand(nvml_driver) as nvml:
        yield nvml


@pytest.fixture
def process(nvml: HandNvml) -> Stepper:
    return Stepper(nvml)


@pytest.fixture
def cases(golden: Golden) -> Cases:
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
