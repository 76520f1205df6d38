"""Simulated jobs, each simulated and diagnosed once, and golden texts of diagnoses."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.diagnosis.workloads import job, simulate
from warpwatch_diagnosis.diagnosis import Diagnosis, diagnose
from warpwatch_diagnosis.report.html import render_html
from warpwatch_diagnosis.report.text import render_text

# The style and the elements of a page; tones, and labels of drawings for who cannot see them, stay.
MARKUP = re.compile(
    r'<style>.*?</style>|<(?:section class="(verdict \w+)"|[^>]*? aria-label="([^"]*)")?[^>]*>',
    re.DOTALL,
)


class Simulations:
    """The traces of the jobs of faults.py, by name and seed, and their diagnoses."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self.paths = cache(self._simulate)
        self.diagnosis = cache(self._diagnose)

    def _simulate(self, name: str, seed: int = 1) -> list[Path]:
        return simulate(job(name, seed), self._factory.mktemp(name), seed)

    def _diagnose(self, name: str, seed: int = 1) -> Diagnosis:
        return diagnose(self.paths(name, seed))


@pytest.fixture(scope="session")
def simulations(tmp_path_factory: pytest.TempPathFactory) -> Simulations:
    return Simulations(tmp_path_factory)


@pytest.fixture
def golden_text(golden_case: Callable[..., None]) -> Callable[[Diagnosis], None]:
    """Compare all that a diagnosis says on a terminal and on a page with the case's golden file."""

    def compare(found: Diagnosis) -> None:
        page = MARKUP.sub(r"\1\2\n", render_html(found)).splitlines()
        golden_case(render_text(found) + "".join(f"{line}\n" for line in page if line.strip()))

    return compare
