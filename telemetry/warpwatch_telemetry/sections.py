"""Provides the parts of configuration sections: values with units and bounds, and the base.

Each package declares its own section; the daemon composes them.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from warpwatch_telemetry.anomalies import KINDS

_BYTE_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    # Kubernetes writes Gi and G.
    _BYTE_UNITS |= dict.fromkeys((f"{_letter}I", f"{_letter}IB"), 1024**_power)
    _BYTE_UNITS |= dict.fromkeys((_letter, f"{_letter}B"), 1000**_power)
_SECOND_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_QUANTITY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def nearest(name: object, names: Iterable[str]) -> str | None:
    """Return the one of ``names`` that was probably meant."""
    return next(iter(difflib.get_close_matches(str(name), list(names), n=1)), None)


def _number(expected: str) -> BeforeValidator:
    """Refuse ``true``, which Python takes for 1."""

    def check(value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"expected {expected}")
        return value

    return BeforeValidator(check)


def _quantity(kind: type[float], units: dict[str, int], names: str) -> BeforeValidator:
    """Read a text with a unit, as ``5GiB`` or ``14d``; other values are left to pydantic."""

    def read(value: Any) -> Any:
        match = _QUANTITY.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return value
        unit = units.get(match[2], units.get(match[2].upper()))
        if unit is None:
            raise ValueError(f"unit {match[2]!r} is none of {names}")
        return kind(float(match[1]) * unit)

    return BeforeValidator(read)


def _kind(value: Any) -> Any:
    if value not in KINDS:
        raise ValueError(
            f"expected an anomaly kind such as {(nearest(value, KINDS) or KINDS[0])!r}"
        )
    return value


def _written(pattern: str) -> WithJsonSchema:
    """Return the schema for editors and the chart: a number, or a text with its unit."""
    return WithJsonSchema(
        {"anyOf": [{"type": "number", "minimum": 0}, {"type": "string", "pattern": pattern}]}
    )


# Last in the annotation, so that the bounds before it reach the schema.
REAL = _number("a number")
WHOLE = _number("a whole number")
_BYTES = _quantity(int, _BYTE_UNITS, "B, KiB, MiB, GiB, TiB, KB, MB, GB, TB")
_SECONDS = _quantity(float, _SECOND_UNITS, "s, m, h, d, w")
_SIZE = r"^\d+(\.\d+)? ?([KMGTkmgt][Ii]?)?[Bb]?$"
_DURATION = r"^\d+(\.\d+)? ?[smhdw]?$"

Boolean = Annotated[bool, Field(strict=True)]
Bytes = Annotated[int, Field(ge=0), WHOLE, _BYTES, _written(_SIZE)]
Age = Annotated[float, Field(ge=0, allow_inf_nan=False), REAL, _SECONDS, _written(_DURATION)]
Interval = Annotated[float, Field(ge=0.1, le=3600), REAL]
Share = Annotated[float, Field(ge=0, le=1), REAL]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), REAL]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), REAL]
Count = Annotated[int, Field(ge=0), WHOLE]
AtLeastOne = Annotated[int, Field(ge=1), WHOLE]
AnomalyKind = Annotated[
    str, BeforeValidator(_kind), WithJsonSchema({"type": "string", "enum": list(KINDS)})
]
Url = Annotated[str, Field(pattern=r"^https?://[^/?#@\s]+")]


class Section(BaseModel):
    """A frozen part of the configuration; a key that it does not know is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")
