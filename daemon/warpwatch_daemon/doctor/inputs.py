"""What every group of checks is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from warpwatch_daemon.api_client import ApiClient
from warpwatch_daemon.config.sections import Config
from warpwatch_daemon.doctor.check import Check
from warpwatch_daemon.doctor.facts import Survey
from warpwatch_daemon.doctor.machine import Machine


@dataclass(frozen=True, slots=True)
class CheckInputs:
    config: Config
    api: ApiClient
    machine: Machine
    survey: Survey


Group = Callable[[CheckInputs], Iterator[Check]]
