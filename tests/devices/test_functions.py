"""What functions without a state return: a table of calls, which have literals as arguments."""

import ast
from importlib import import_module

import pytest

from tests.conftest import Cases
from warpwatch_devices import processes


def test_each_call_returns_what_its_line_says(
    cases: Cases, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(text: str) -> object:
        name, _, arguments = text.partition(" ")
        module, _, function = name.rpartition(".")
        called = getattr(import_module(f"warpwatch_devices.{module}"), function)
        try:
            found = called(*ast.literal_eval(f"({arguments},)"))
        except ValueError as error:
            return f"{type(error).__name__}: {error}"
        return sorted(found) if isinstance(found, set | frozenset) else found

    monkeypatch.setattr(processes, "_TICK_S", 0.01)
    monkeypatch.setattr(processes, "_PAGE_BYTES", 4096)
    cases("devices/functions.txt", call)
