"""Tables of calls with literals as arguments: of functions without a state, and of objects."""

import ast
from importlib import import_module
from inspect import signature
from typing import Any

import pytest

from tests.conftest import Cases
from tests.manual_clock import ManualClock
from warpwatch_devices import processes


def named(text: str) -> Any:
    module, _, name = text.rpartition(".")
    return getattr(import_module(f"warpwatch_devices.{module}"), name)


def result(call: Any, arguments: str) -> object:
    try:
        found = call(*ast.literal_eval(f"({arguments},)" if arguments else "()"))
    except ValueError as error:
        return f"{type(error).__name__}: {error}"
    return sorted(found) if isinstance(found, set | frozenset) else found


def test_each_call_returns_what_its_line_says(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_TICK_S", 0.01)
    monkeypatch.setattr(processes, "_PAGE_BYTES", 4096)

    def call(text: str) -> object:
        name, _, arguments = text.partition(" ")
        return result(named(name), arguments)

    cases("devices/functions.txt", call)


def test_each_object_returns_what_its_calls_say_one_after_another(cases: Cases) -> None:
    def play(text: str) -> list[object]:
        first, *steps = text.splitlines()
        made, clock = named(first), ManualClock()
        clocks = {name: getattr(clock, name) for name in ("monotonic", "wall")}
        played = made(**{name: clocks[name] for name in signature(made).parameters})
        said = []
        for step in steps:
            name, _, arguments = step.partition(" ")
            # The clock is moved with its own methods.
            said.append(result(getattr(played, name, None) or getattr(clock, name), arguments))
        return said

    cases("devices/objects.txt", play)
