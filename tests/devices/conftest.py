"""The fake driver in the tests' own process, with a clock that a test moves."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.devices.fakenvml.driver import FakeDriver
from tests.devices.nvml_by_hand import HandNvml, nvml_by_hand


@pytest.fixture
def nvml(nvml_driver: FakeDriver) -> Iterator[HandNvml]:
    """Eight H100."""
    with nvml_by_hand(nvml_driver) as nvml:
        yield nvml
