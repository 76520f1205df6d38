"""Values of the configuration, as text with a unit or as a number."""

import yaml
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from tests.conftest import Cases
from warpwatch_telemetry.sections import Age, AnomalyKind, Bytes, Section


class Example(Section):
    size: Bytes = 0
    age: Age = 0.0
    kind: AnomalyKind = "hang"


def test_a_value_is_what_its_unit_says_or_refused_by_what_is_wrong(cases: Cases) -> None:
    schema = Draft202012Validator(Example.model_json_schema())

    def read(text: str) -> object:
        value = yaml.safe_load(text)
        try:
            example = Example.model_validate(value)
        except ValidationError as error:
            assert not schema.is_valid(value)
            return str([(one["loc"], one["msg"]) for one in error.errors()])
        assert schema.is_valid(value)
        return example

    cases("telemetry/values.txt", read)
