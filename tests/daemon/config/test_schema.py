"""`warpwatch config schema` and `config check`: for editors, and for whoever reviews a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from warpwatch_daemon.cli import main
from warpwatch_daemon.config import loading
from warpwatch_daemon.config.sections import Config


@pytest.fixture
def schema(capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["config", "schema"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_schema_takes_every_default_and_values_with_units(schema: Any) -> None:
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(loading.as_tree(Config()), schema)
    jsonschema.validate({"store": {"max_bytes": "1.5GiB", "max_age": "2h"}}, schema)


@pytest.mark.parametrize(
    "text",
    [
        "http: {liste: x}",
        "sources: {host: {interval_s: 0}}",
        "sources: {simulated: {devices: 65}}",
        "store: {max_bytes: 5 parsecs}",
        "detection: {hang: {enabled: 'yes'}}",
    ],
)
def test_the_schema_refuses_what_the_daemon_refuses(schema: Any, text: str) -> None:
    tree = yaml.safe_load(text)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(tree, schema)
    with pytest.raises(loading.ConfigError):
        loading.parse(tree, "test")


def test_a_check_prints_a_line_for_each_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("http: {liste: x}\nstore: {max_age: 3 moons}\ntriggers: {dry: 5}\n")
    assert main(["config", "check", str(file)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{file}: http.liste: unknown key, did you mean 'listen'?",
        f"{file}: triggers.dry: unknown key, did you mean 'dry_run'?",
        f"{file}: store.max_age: unit 'moons' is none of s, m, h, d, w, not '3 moons'",
    ]
    assert main(["config", "check", str(file), "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert said["valid"] is False
    assert len(said["errors"]) == 3
