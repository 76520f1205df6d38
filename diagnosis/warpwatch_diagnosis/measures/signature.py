"""What an operator's recorded arguments say: shapes, types, the line that called it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from warpwatch_diagnosis.measures.flops import Shapes, shapes_of
from warpwatch_diagnosis.measures.places import of_stack

MAX_TEXT = 400


@dataclass(frozen=True, slots=True)
class Signature:
    """What the arguments of an operator say."""

    text: str | None
    shapes: Shapes | None
    types: tuple[str, ...]
    place: str | None


NO_SIGNATURE = Signature(None, None, (), None)


def signature_of(arguments: Mapping[str, Any]) -> Signature:
    shapes = shapes_of(arguments)
    text = None
    if shapes is not None:
        text = " ".join(str(list(shape)) for shape in shapes if shape)[:MAX_TEXT]
    stack = arguments.get("Call stack")
    return Signature(
        text=text,
        shapes=shapes,
        types=_types(arguments.get("Input type")),
        place=of_stack(stack) if isinstance(stack, str) else None,
    )


def _types(given: Any) -> tuple[str, ...]:
    return tuple(t if isinstance(t, str) else "" for t in given) if isinstance(given, list) else ()
