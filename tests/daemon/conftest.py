"""Fixtures of the daemon's tests: a stack of contexts that ends with the test."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack
