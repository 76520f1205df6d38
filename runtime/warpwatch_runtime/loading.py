"""Loads a configuration file and the environment over it, and reports mistakes with their path."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from warpwatch_telemetry.anomalies import KINDS
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.sections import Section, nearest

logger = logging.getLogger(__name__)


class Mistake(NamedTuple):
    """A mistake: ``text`` tells the expected, ``value`` is the repr of the value found.

    ``value`` is empty for an unknown or missing key. ``kind``: pydantic's name.
    """

    path: str
    text: str
    value: str = ""
    kind: str = ""

    def __str__(self) -> str:
        """Return one line with all parts."""
        return self.without_value() + (f", not {self.value}" if self.value else "")

    def without_value(self) -> str:
        """Return the line for a value that may be a secret or of a stranger."""
        return ": ".join(part for part in (self.path, self.text) if part)


def mistakes(error: ValidationError, model: type[BaseModel]) -> list[Mistake]:
    """Return the mistakes of a tree that does not fit the model, in the order of fields."""
    return [_mistake(details, model) for details in error.errors(include_url=False)]


def _mistake(details: ErrorDetails, model: type[BaseModel]) -> Mistake:
    # pydantic marks a mapping's own key so.
    place = [part for part in details["loc"] if part != "[key]"]
    path, kind = _written(place), details["type"]
    if kind == "extra_forbidden":
        near = nearest(place[-1], _keys(model, place[:-1]))
        text = f"unknown key, did you mean {near!r}?" if near else "unknown key"
        return Mistake(path, text, kind=kind)
    if kind == "missing":
        return Mistake(path, "this key is needed", kind=kind)
    # The text names the keys that exclude each other.
    is_section = kind == "value_error" and isinstance(details["input"], dict)
    return Mistake(path, _expected(details), "" if is_section else repr(details["input"]), kind)


def _keys(model: type[BaseModel], place: Sequence[int | str]) -> Iterator[str]:
    """Return names of the fields of the section at ``place``."""
    for part in place:
        field = model.model_fields.get(str(part))
        # Other names are keys of the mapping that was entered last.
        if field is not None:
            model = next(_models(field.annotation), model)
    return iter(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _written(place: Sequence[int | str]) -> str:
    return ".".join(
        str(part) if isinstance(part, int) or part.isprintable() else repr(part) for part in place
    )


# By pydantic's names of mistakes.
_TEXTS: dict[str, str] = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "expected a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "expected a number"),
    **dict.fromkeys(("tuple_type", "list_type"), "expected a list"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "expected a mapping"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "expected true or false"),
    "finite_number": "expected a finite number",
    "path_type": "expected a path",
    "string_type": "expected a text",
}
_BOUNDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "value_error": lambda context: str(context["error"]),
    "literal_error": lambda context: f"expected one of {_listed(context['expected'])}",
    "greater_than": lambda context: f"expected a number > {context['gt']:g}",
    "greater_than_equal": lambda context: f"expected a number >= {context['ge']:g}",
    "less_than": lambda context: f"expected a number < {context['lt']:g}",
    "less_than_equal": lambda context: f"expected a number <= {context['le']:g}",
    "string_pattern_mismatch": lambda context: f"expected a text that matches {context['pattern']}",
}


def _expected(details: ErrorDetails) -> str:
    kind = details["type"]
    if kind in _TEXTS:
        return _TEXTS[kind]
    if kind in _BOUNDS:
        return _BOUNDS[kind](details["ctx"])
    text = details["msg"]
    return text[0].lower() + text[1:]


def _listed(expected: str) -> str:
    """Convert ``'a', 'b' or 'c'`` to ``a, b, c``."""
    return expected.replace("'", "").replace(" or ", ", ")


ENV_PREFIX = "WARPWATCH_"
# Keys of the minor version before, each with the reason that a warning gives.
REMOVED = {
    "exporters.grafana": "Grafana's marks of anomalies and captures come from the metrics",
    "rendezvous.kineto": "captures without the shim were removed, use `warpwatch run`",
    "fleet.shard": "one process judges all jobs",
}
# Each kind of anomaly had a switch of its own; ``false`` is translated to ``detection.disabled``.
SWITCHES = {f"detection.{kind}.enabled": kind for kind in KINDS}

C = TypeVar("C", bound=Section)

# PyYAML raises these for bad texts: its own errors, bad dates and numbers, deep nesting, and errors
# of constructors of tagged values (`!!int ""`, `!!bool maybe`).
_NOT_YAML = (yaml.YAMLError, ValueError, RecursionError, LookupError, AttributeError, TypeError)


class ConfigError(UsageError):
    """A wrong configuration. ``lines``: one for each mistake; the text is the first of them."""

    def __init__(self, lines: list[str]) -> None:
        more = f" (and {len(lines) - 1} more: warpwatch config check)" if len(lines) > 1 else ""
        super().__init__(lines[0] + more)
        self.lines = lines


def load(model: type[C], path: Path | None, environ: Mapping[str, str] = os.environ) -> C:
    """Return the configuration of ``path`` (None: only defaults) with the environment on top.

    Raises UsageError that names the key, the value and what would be right.
    """
    tree = read_tree(path) if path else {}
    names = overlay(tree, environ)
    return parse(model, tree, ", ".join([str(path), *names] if path else names))


def parse(model: type[C], tree: dict[str, Any], origin: str) -> C:
    """Return the configuration of a tree that came from ``origin``. Raises ConfigError."""
    # A section whose keys are all commented out counts as absent.
    known = model.model_fields
    tree = {key: value for key, value in tree.items() if value is not None or key not in known}
    tree = _without_switches(_without_removed(tree, origin), origin)
    try:
        return model.model_validate(tree)
    except ValidationError as error:
        raise ConfigError([f"{origin}: {one}" for one in mistakes(error, model)]) from error


def _without_removed(tree: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the tree without keys that no longer exist, and log a warning for each."""
    tree = copy.deepcopy(tree)
    for key, why in REMOVED.items():
        if _remove(tree, key) is not None:
            logger.warning("%s: %s is ignored: %s", origin, key, why)
    return tree


def _without_switches(tree: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the tree with ``detection.disabled`` instead of switches, and log a warning."""
    removed = {key: is_on for key in SWITCHES if (is_on := _remove(tree, key, bool)) is not None}
    if not removed:
        return tree
    off = [SWITCHES[key] for key, is_on in removed.items() if not is_on]
    logger.warning(
        "%s: %s: removed keys, use detection.disabled: [%s]",
        origin,
        ", ".join(removed),
        ", ".join(off),
    )
    if off:
        section = tree.setdefault("detection", {})
        known = section.setdefault("disabled", [])
        section["disabled"] = [*known, *off] if isinstance(known, list) else known
    return tree


def _remove(tree: dict[str, Any], key: str, of: type = object) -> Any:
    """Remove the dotted key and sections that are empty without it; return its value or None.

    A value of another type than ``of`` stays, and is refused as that of an unknown key.
    """
    first, _, rest = key.partition(".")
    below = tree.get(first)
    if not rest:
        return tree.pop(first, None) if isinstance(below, of) else None
    value = _remove(below, rest, of) if isinstance(below, dict) else None
    if value is not None and not below:
        del tree[first]
    return value


def as_tree(config: Section) -> dict[str, Any]:
    """Return the configuration as values of YAML and JSON, which ``parse`` reads."""
    return config.model_dump(mode="json")


def parse_value(text: str) -> Any:
    """Return the value of a YAML text; another text is itself."""
    try:
        return yaml.safe_load(text)
    except _NOT_YAML:
        return text


def read_yaml(path: Path) -> Any:
    """Return the content of a file, None for an empty one. Raises UsageError with one line."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except _NOT_YAML as error:
        line = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{path}: not YAML: {line}") from error


def read_tree(path: Path) -> dict[str, Any]:
    """Return the sections of a file. Raises UsageError with one line."""
    tree = read_yaml(path)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: a mapping of sections is needed, found {type(tree).__name__}")
    return {str(key): value for key, value in tree.items()}


def overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Put ``WARPWATCH_SECTION__KEY`` into the tree, and return the names of these variables.

    Raises UsageError without such a section.
    """
    names = []
    for name, text in environ.items():
        # A name without a section belongs to another part, such as WARPWATCH_DIR.
        if not name.startswith(ENV_PREFIX) or "__" not in name:
            continue
        *parents, leaf = name.removeprefix(ENV_PREFIX).lower().split("__")
        node = tree
        for parent in parents:
            child = node.get(parent)
            if child is None:
                # All keys of the section may be commented out.
                child = node[parent] = {}
            if not isinstance(child, dict):
                raise UsageError(f"{name}: {parent} is not a section")
            node = child
        node[leaf] = parse_value(text)
        names.append(name)
    return names
