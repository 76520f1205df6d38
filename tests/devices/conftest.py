"""The fake driver in the tests' own process."""

from collections.abc import Callable, Iterator

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_by_hand import HandNvml, Stepper, nvml_by_hand

Golden = Callable[[str, bytes], None]


@pytest.fixture
def nvml(nvml_driver: FakeDriver) -> Iterator[HandNvml]:
    with nvml_by_hand(nvml_driver) as nvml:
        yield nvml


@pytest.fixture
def process(nvml: HandNvml) -> Stepper:
    return Stepper(nvml)
