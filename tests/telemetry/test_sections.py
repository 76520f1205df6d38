"""Values of the configuration, as text with a unit or as a number."""

import yaml
from pydantic import ValidationError

from tests.conftest import Cases
from warpwatch_telemetry.sections import Age, AnomalyKind, Bytes, Section


class Example(Section):
    size: Bytes = 0
    age: Age = 0.0
    kind: AnomalyKind = "hang"


def test_a_value_is_what_its_unit_says_or_refused_by_what_is_wrong(cases: Cases) -> None:
    def read(text: str) -> object:
        try:
            return Example.model_validate(yaml.safe_load(text))
        except ValidationError as error:
            return str([(one["loc"], one["msg"]) for one in error.errors()])

    cases("telemetry/values.txt", read)
