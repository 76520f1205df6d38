"""Trees of YAML and JSON into frozen structs, with every mistake named by its path.

msgspec judges the single values; the structs are walked here, because its errors stop at the
first mistake and carry neither the value nor the key of a mapping.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin

import msgspec

Kind = TypeVar("Kind")


class Mistake(NamedTuple):
    """``text`` says what would be right, ``value`` is what was found as Python writes it.

    ``value`` is empty where there is none: for a key that is unknown or missing.
    """

    path: str
    text: str
    value: str = ""
    unknown_key: bool = False

    def __str__(self) -> str:
        """All in one line."""
        found = f", not {self.value}" if self.value else ""
        return ": ".join(part for part in (self.path, self.text + found) if part)


class NotConvertibleError(ValueError):
    """``mistakes``: at least one, in the order of the tree."""

    def __init__(self, mistakes: list[Mistake]) -> None:
        super().__init__(str(mistakes[0]))
        self.mistakes = mistakes


def convert(tree: Any, kind: type[Kind], *, strict: bool = False) -> Kind:
    """``tree`` as the struct ``kind``. Raises NotConvertibleError.

    A function among a field's annotations gets the value first: it gives another one, or raises
    ValueError with what would be right. ``strict``: no number is taken from a text.
    """
    walk = _Walk(strict)
    converted = walk.value(tree, kind, ())
    if walk.mistakes:
        raise NotConvertibleError(walk.mistakes)
    return converted  # type: ignore[no-any-return]


def nearest(name: object, names: Iterable[str]) -> str | None:
    """The one of ``names`` that was probably meant."""
    import difflib

    return next(iter(difflib.get_close_matches(str(name), list(names), n=1)), None)


class _Walk:
    def __init__(self, strict: bool) -> None:
        self.mistakes: list[Mistake] = []
        self._strict = strict

    def value(self, node: Any, kind: Any, path: tuple[object, ...]) -> Any:
        """``node`` as ``kind``; None where it is a mistake."""
        bare, readers = _split(kind)
        try:
            for read in readers:
                node = read(node)
        except ValueError as error:
            return self._mistake(path, str(error), node)
        if isinstance(node, Mapping):
            if isinstance(bare, type) and issubclass(bare, msgspec.Struct):
                return self._struct(node, bare, path)
            if get_origin(bare) is dict:
                return self._mapping(node, get_args(bare), path)
        try:
            return msgspec.convert(node, kind, strict=self._strict, dec_hook=_decode)
        except msgspec.ValidationError as error:
            inside, text = _expected(error, bare)
            return self._mistake((*path, *inside), text, node)

    def _struct(
        self, node: Mapping[Any, Any], kind: type[msgspec.Struct], path: tuple[object, ...]
    ) -> Any:
        fields = {field.name: field for field in msgspec.structs.fields(kind)}
        before, values = len(self.mistakes), {}
        for key, value in node.items():
            if key in fields:
                values[key] = self.value(value, fields[key].type, (*path, key))
            else:
                self._unknown((*path, key), fields)
        for name, field in fields.items():
            if field.required and name not in node:
                self.mistakes.append(Mistake(_written((*path, name)), "this key is needed"))
        return kind(**values) if len(self.mistakes) == before else None

    def _mapping(
        self, node: Mapping[Any, Any], kinds: tuple[Any, ...], path: tuple[object, ...]
    ) -> dict[Any, Any]:
        of_key, of_value = kinds
        return {
            self.value(key, of_key, (*path, key)): self.value(value, of_value, (*path, key))
            for key, value in node.items()
        }

    def _unknown(self, path: tuple[object, ...], names: Iterable[str]) -> None:
        near = nearest(path[-1], names)
        text = f"unknown key, did you mean {near!r}?" if near else "unknown key"
        self.mistakes.append(Mistake(_written(path), text, unknown_key=True))

    def _mistake(self, path: tuple[object, ...], text: str, node: Any) -> None:
        self.mistakes.append(Mistake(_written(path), text, repr(node)))


def _split(kind: Any) -> tuple[Any, list[Any]]:
    """A type without its annotations and without None; the functions among the annotations."""
    readers: list[Any] = []
    if get_origin(kind) is Annotated:
        kind, *annotations = get_args(kind)
        readers = [each for each in annotations if callable(each)]
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [each for each in get_args(kind) if each is not type(None)]
        if len(kinds) == 1:
            kind, inner = _split(kinds[0])
            readers += inner
    return kind, readers


def _decode(kind: type, value: Any) -> Any:
    if kind is not Path:
        raise TypeError(f"no way to read {kind}")
    if not isinstance(value, str):
        raise ValueError("Expected `path`")
    return Path(value)


def _written(path: tuple[object, ...]) -> str:
    plain = (isinstance(part, str) and part.isprintable() for part in path)
    return ".".join(
        str(part) if as_it_is else repr(part) for part, as_it_is in zip(path, plain, strict=True)
    )


# How msgspec names types, and how an author of YAML or JSON does.
_NAMES = {
    "array": "a list",
    "bool": "true or false",
    "float": "a number",
    "int": "a whole number",
    "null": "nothing",
    "object": "a mapping",
    "path": "a path",
    "str": "a text",
}


def _expected(error: msgspec.ValidationError, kind: Any) -> tuple[list[str], str]:
    """Where in a list, and what would be right there, from msgspec's words."""
    import re

    text, _, where = str(error).partition(" - at `$")
    if get_origin(kind) is Literal:
        text = f"expected one of {', '.join(map(str, get_args(kind)))}"
    text = re.sub(r", got `.*`$", "", text)
    text = re.sub(
        r"`([\w |]+)`",
        lambda types: " or ".join(_NAMES.get(name, name) for name in types[1].split(" | ")),
        text,
    )
    return re.findall(r"\[(\d+)\]", where), text[0].lower() + text[1:]
