"""The schema of the chart's value ``config``, made of the configuration's own.

It is wider than `warpwatch config schema` by what the chart completes or the daemon takes besides:
a section that is null, a section that variables complete, and numbers that ``--set`` makes texts.
"""

import json
import re
from typing import Any

from warpwatch_daemon.cli.config import schema
from warpwatch_fleet.config import FleetFile
from warpwatch_runtime.loading import REMOVED, SWITCHES

_FOR_PEOPLE = ("title", "description", "default", "$schema")
# Pydantic reads these texts as numbers.
_TEXTS = {"integer": r"^-?[0-9]+$", "number": r"^-?[0-9]*\.?[0-9]+([eE][-+]?[0-9]+)?$"}
# The names of classes; those that are written by hand begin with a small letter.
_GENERATED = re.compile(r'^    "[A-Z]\w*": .*\n', re.MULTILINE)


def definitions() -> dict[str, Any]:
    """Return the definitions of a JSON Schema (draft 7), ``Config`` among them."""
    of_agent, of_fleet = schema(), FleetFile.model_json_schema()
    found = {**of_fleet.pop("$defs"), **of_agent.pop("$defs"), "Config": of_agent}
    of_agent["properties"]["fleet"] = {"$ref": "#/$defs/FleetConfig"}
    sections: list[str] = [one["$ref"] for one in of_agent["properties"].values() if "$ref" in one]
    lists = re.findall(r'"items": \{"\$ref": "#/\$defs/(\w+)"', json.dumps(found))
    for name, definition in found.items():
        if name not in lists:
            definition.pop("required", None)
    for reference in sections:
        found[_name(reference)]["type"] = ["object", "null"]
    for key in (*REMOVED, *SWITCHES):
        _admit(found, of_agent["properties"], key.split("."))
    of_agent["type"] = ["object", "null"]
    return {name: _plain(found[name]) for name in sorted(found)}


def spliced(text: str) -> str:
    """Return the text of values.schema.json with the definitions of now at its end."""
    written = _GENERATED.sub("", text).rstrip().removesuffix("}\n}").rstrip()
    lines = [f'    "{name}": {json.dumps(value)}' for name, value in definitions().items()]
    return f"{written.rstrip(',').rstrip()},\n" + ",\n".join(lines) + "\n  }\n}\n"


def _admit(found: dict[str, Any], properties: dict[str, Any], key: list[str]) -> None:
    """Accept a key that was removed, for the daemon to translate or ignore."""
    first, *rest = key
    below = properties.setdefault(first, {})
    if rest and "$ref" in below:
        _admit(found, found[_name(below["$ref"])]["properties"], rest)


def _name(reference: str) -> str:
    return reference.rpartition("/")[2]


def _plain(node: Any) -> Any:
    if isinstance(node, list):
        return [_plain(one) for one in node]
    if not isinstance(node, dict):
        return node
    # Keys of properties are names, which may be called as keywords are.
    plain: dict[str, Any] = {
        key: {name: _plain(one) for name, one in value.items()}
        if key == "properties"
        else _plain(value)
        for key, value in node.items()
        if key not in _FOR_PEOPLE
    }
    if "$ref" in plain:
        plain["$ref"] = f"#/definitions/{_name(plain['$ref'])}"
    if names := plain.pop("propertyNames", None):
        # Helm does not say where a name is that propertyNames refuses.
        plain["patternProperties"] = {
            f"^({'|'.join(names['enum'])})$": plain["additionalProperties"]
        }
        plain["additionalProperties"] = False
    if isinstance(kind := plain.get("type"), str) and kind in _TEXTS:
        plain |= {"type": [kind, "string"], "pattern": _TEXTS[kind]}
    return plain
