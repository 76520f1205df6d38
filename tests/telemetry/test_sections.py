"""Values of the configuration, as text with a unit or as a number."""

from typing import Any

import pytest
from pydantic import ValidationError

from warpwatch_telemetry.sections import Age, AnomalyKind, Bytes, Section


class Example(Section):
    size: Bytes = 0
    age: Age = 0.0
    kind: AnomalyKind = "hang"


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("size", "5GiB", 5 * 2**30),
        ("size", "1.5 kB", 1500),
        ("size", 7, 7),
        ("age", "14d", 14 * 86400.0),
        ("age", "2m", 120.0),
        ("age", 3, 3.0),
        ("kind", "straggler", "straggler"),
    ],
)
def test_a_value_is_what_its_unit_says(key: str, value: Any, meant: Any) -> None:
    assert getattr(Example.model_validate({key: value}), key) == meant


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("size", "5 parsecs", "unit 'parsecs' is none of B, KiB"),
        ("size", -1, "greater than or equal to"),
        ("age", "3 parsecs", "unit 'parsecs' is none of s, m, h, d, w"),
        ("age", -1, "greater than or equal to"),
        ("kind", "straggle", "expected an anomaly kind such as 'straggler'"),
        ("kin", "hang", "kin"),
    ],
)
def test_what_no_value_can_mean_is_refused(key: str, value: Any, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Example.model_validate({key: value})
