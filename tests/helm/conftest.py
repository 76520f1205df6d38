"""Helm 3 and Helm 4, downloaded once into pytest's cache."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from tests.helm.binaries import CannotGetError, binaries
from tests.helm.chart import write_training


def _tools(config: pytest.Config, which: str) -> Path:
    cache = config.cache
    assert cache is not None
    folder = cache.mkdir("helm")
    with open(folder / "lock", "w") as lock:
        # Tests may run in several processes.
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            return binaries(folder, which)
        except CannotGetError as reason:
            pytest.skip(f"no {which}: {reason}")


@pytest.fixture(scope="session")
def helm3(pytestconfig: pytest.Config) -> Path:
    return _tools(pytestconfig, "helm3") / "helm"


@pytest.fixture(scope="session")
def helm4(pytestconfig: pytest.Config) -> Path:
    return _tools(pytestconfig, "helm4") / "helm"


@pytest.fixture(scope="session")
def kubectl(pytestconfig: pytest.Config) -> Path:
    return _tools(pytestconfig, "helm3") / "kubectl"


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chart that depends on ours."""
    folder = tmp_path_factory.mktemp("chart") / "training"
    write_training(folder)
    return folder
