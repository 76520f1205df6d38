"""What stands behind the configuration's sections: units, YAML, and variables on top of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from warpwatch_daemon.config.conversion import nearest
from warpwatch_telemetry.anomalies import KINDS
from warpwatch_telemetry.errors import UsageError

ENV_PREFIX = "WARPWATCH_"

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_AGES = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

# What PyYAML raises for texts of its users: its own errors, bad dates and numbers, deep nesting.
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError)


def parse_bytes(value: Any) -> Any:
    """``5GiB`` → 5368709120. Anything that is not such a text is given back as it is."""
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if isinstance(value, str)
        else None
    )
    if match is None:
        return value
    unit = _UNITS.get(match[2].upper())
    if unit is None:
        raise ValueError(f"unit {match[2]!r} is none of B, KiB, MiB, GiB, TiB, KB, MB, GB, TB")
    return int(float(match[1]) * unit)


def parse_age(value: Any) -> Any:
    """``14d`` → 1209600 seconds."""
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]?)\s*", value) if isinstance(value, str) else None
    )
    if match is None:
        return value
    unit = _AGES.get(match[2] or "s")
    if unit is None:
        raise ValueError(f"unit {match[2]!r} is none of s, m, h, d, w")
    return float(match[1]) * unit


# The last colon is before the port. IPv6 also without brackets, as $(POD_IP):9400 has it.
_LISTEN = re.compile(
    r"(\[[0-9A-Fa-f:]+\]|(?:[0-9A-Fa-f]{0,4}:){2,7}[0-9A-Fa-f]{1,4}|[^:\s]*):\d{1,5}"
)


def check_listen(value: Any) -> Any:
    if isinstance(value, str) and not _LISTEN.fullmatch(value):
        raise ValueError("an address and a port are needed, such as 127.0.0.1:9400")
    return value


def check_kind(kind: Any) -> Any:
    if kind not in KINDS:
        near = nearest(kind, KINDS)
        raise ValueError(f"expected an anomaly kind such as {(near or KINDS[0])!r}")
    return kind


def parse_value(text: str) -> Any:
    """One value as YAML would have it; what is no YAML is a text."""
    try:
        return yaml.safe_load(text)
    except _NOT_YAML:
        return text


def read_yaml(path: Path) -> dict[str, Any]:
    """Raises UsageError with one line."""
    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except _NOT_YAML as error:
        line = " ".join(str(error).split())
        raise UsageError(f"{path}: not YAML: {line}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: a mapping of sections is needed, found {type(tree).__name__}")
    return tree


def overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> None:
    """Put ``WARPWATCH_SECTION__KEY`` into the tree. Raises UsageError where there is no section."""
    for name, text in environ.items():
        # One without a section is another part's, such as WARPWATCH_DIR.
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        *parents, leaf = name.removeprefix(ENV_PREFIX).lower().split("__")
        node = tree
        for parent in parents:
            child = node.setdefault(parent, {})
            if not isinstance(child, dict):
                raise UsageError(f"{name}: {parent} is no section")
            node = child
        node[leaf] = parse_value(text)
