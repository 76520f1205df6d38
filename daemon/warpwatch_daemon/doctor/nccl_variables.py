"""What settings of NCCL and its surroundings do to a training, variable by variable.

Meanings are those of NVIDIA's NCCL user guide and of PyTorch's ProcessGroupNCCL environment
variables; which value of which is worth a word is in the table beside this file.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NodeNetwork:
    """What the values of a process refer to. ``interfaces`` None: not known."""

    interfaces: frozenset[str] | None
    adapters: frozenset[str]


# Whether a value is worth a word where it is set.
Test = Callable[[str, NodeNetwork], bool]


@dataclass(frozen=True, slots=True)
class Variable:
    """``names``: the same setting under its names. ``ok``: False a fault, None a note."""

    names: tuple[str, ...]
    suspicious: Test
    ok: bool | None
    meaning: str
    advice: str


def _on(value: str, _: NodeNetwork) -> bool:
    return value.strip().lower() not in ("", "0", "false", "n", "no", "off")


def _off(value: str, _: NodeNetwork) -> bool:
    return value.strip().lower() in ("0", "false", "n", "no", "off")


def _set(value: str, _: NodeNetwork) -> bool:
    return bool(value.strip())


def _one_of(*values: str) -> Test:
    return lambda value, _: value.strip().upper() in values


def _on_with_adapters(value: str, network: NodeNetwork) -> bool:
    return bool(network.adapters) and _on(value, network)


def _on_without_adapters(value: str, network: NodeNetwork) -> bool:
    return not network.adapters and _on(value, network)


def _no_interface(value: str, network: NodeNetwork) -> bool:
    """``eth,ib`` are prefixes, ``=eth0`` exact, ``^docker`` excludes."""
    if network.interfaces is None or value.startswith("^"):
        return False
    exact, wanted = value.startswith("="), value.removeprefix("=").split(",")
    return not any(_fits(name, wanted, exact) for name in network.interfaces)


def _no_adapter(value: str, network: NodeNetwork) -> bool:
    """``mlx5_0:1,mlx5_1`` are prefixes with ports, ``=`` and ``^`` as for interfaces."""
    if not network.adapters or value.startswith("^"):
        return False
    exact = value.startswith("=")
    wanted = [each.partition(":")[0] for each in value.removeprefix("=").split(",")]
    return not any(_fits(name, wanted, exact) for name in network.adapters)


def _fits(name: str, wanted: list[str], exact: bool) -> bool:
    return any(name == each if exact else each and name.startswith(each) for each in wanted)


def _loopback(value: str, _: NodeNetwork) -> bool:
    return value.strip().lstrip("=") == "lo"


_TESTS: dict[str, Test] = {
    "on": _on,
    "off": _off,
    "set": _set,
    "on_with_adapters": _on_with_adapters,
    "on_without_adapters": _on_without_adapters,
    "no_interface": _no_interface,
    "no_adapter": _no_adapter,
    "loopback": _loopback,
}


_OK = {"fault": False, "note": None}


def _variable(names: str, test: str, is_a: str, meaning: str, advice: str) -> Variable:
    suspicious = _one_of(*test[1:].split("|")) if test.startswith("=") else _TESTS[test]
    return Variable(tuple(names.split()), suspicious, _OK[is_a], meaning, advice)


def _table() -> Iterator[list[str]]:
    with Path(__file__).with_suffix(".csv").open(newline="") as file:
        yield from list(csv.reader(file))[1:]


VARIABLES = tuple(_variable(*row) for row in _table())
NAMES = frozenset(name for variable in VARIABLES for name in variable.names)
