"""The image, once a session, and containers that go when their test ends."""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest

from tests.helm.conftest import helm4
from tests.image import containers
from tests.image.containers import CONFINED, Container

__all__ = ["helm4"]

Start = Callable[..., Container]


@pytest.fixture(scope="session")
def image() -> str:
    missing = [name for name in containers.PROGRAMS if shutil.which(name) is None]
    if missing or os.getuid() != 0:
        pytest.skip(f"needs root and {', '.join(missing) or 'nothing else'}")
    containers.make_base()
    containers.build()
    return containers.IMAGE


@pytest.fixture
def start(image: str) -> Iterator[Start]:
    """``start(*options, arguments=())``: a container that may do nothing special."""
    started: list[Container] = []

    def run(*options: str, arguments: tuple[str, ...] = ()) -> Container:
        started.append(Container([*CONFINED, *options], arguments))
        return started[-1]

    yield run
    for container in started:
        container.remove()
