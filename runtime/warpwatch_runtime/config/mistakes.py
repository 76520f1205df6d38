"""What pydantic refuses, in the words of who writes YAML or JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from warpwatch_telemetry.sections import nearest


class Mistake(NamedTuple):
    """``text`` says what would be right, ``value`` is what was found as Python writes it.

    ``value`` is empty where there is none: for a key that is unknown or missing. ``kind``: as
    pydantic calls it.
    """

    path: str
    text: str
    value: str = ""
    kind: str = ""

    def __str__(self) -> str:
        """All in one line."""
        return self.without_value() + (f", not {self.value}" if self.value else "")

    def without_value(self) -> str:
        """For what may be a secret or is a stranger's."""
        return ": ".join(part for part in (self.path, self.text) if part)


def mistakes(error: ValidationError, model: type[BaseModel]) -> list[Mistake]:
    """Of a tree that is no ``model``: at least one, in the order of the fields."""
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
    # Which keys do not go together is in the text.
    is_section = kind == "value_error" and isinstance(details["input"], dict)
    return Mistake(path, _expected(details), "" if is_section else repr(details["input"]), kind)


def _keys(model: type[BaseModel], place: Sequence[int | str]) -> Iterator[str]:
    """Names of the fields of the section at ``place``."""
    for part in place:
        field = model.model_fields.get(str(part))
        # What is no field is a key of the mapping that was entered last.
        if field is not None:
            model = next(_models(field.annotation), model)
    return iter(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The first of the models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)


def _written(place: Sequence[int | str]) -> str:
    return ".".join(
        str(part) if isinstance(part, int) or part.isprintable() else repr(part) for part in place
    )


# By pydantic's own names of what is wrong.
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
    """``'a', 'b' or 'c'`` → ``a, b, c``."""
    return expected.replace("'", "").replace(" or ", ", ")
