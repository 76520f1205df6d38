"""How many parameters the optimizers train: what 6 FLOPs a parameter and token are counted by."""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from math import prod
from typing import Any

from warpwatch import parallelism

# With these an optimizer does not hold the model: adapters beside frozen weights, shards.
_HIDING = frozenset({"peft", "deepspeed"})

Shapes = Counter[tuple[int, ...]]


class Parameters:
    """Of the optimizers that step in turn; each is looked at once."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        # Shapes and types; nothing where they are not the whole model.
        self._known: weakref.WeakKeyDictionary[Any, tuple[Shapes, set[str]]] = (
            weakref.WeakKeyDictionary()
        )

    def know(self, optimizer: Any) -> bool:
        return optimizer in self._known

    def add(self, optimizer: Any) -> dict[str, Any]:
        """What the ring's metadata says of all: nothing where one is not known."""
        try:
            self._known[optimizer] = _shapes(optimizer)
        except Exception:
            self._known[optimizer] = Counter(), set()  # one of its own kind
        known = list(self._known.values())
        # Two of the same shapes train copies of a model, or one model twice (meta-learning).
        if len({frozenset(shapes.items()) for shapes, _ in known}) < len(known):
            return {}
        total: Shapes = sum((shapes for shapes, _ in known), Counter())
        if not all(shapes for shapes, _ in known) or _has_experts(total):
            return {}
        said: dict[str, Any] = {
            "parameters": sum(prod(shape) * count for shape, count in total.items())
        }
        types = set().union(*(types for _, types in known))
        # With parameters of 32 bits autocast and TF32 are the rule, and not to be seen.
        return {**said, "precision": types.pop()} if types in ({"bfloat16"}, {"float16"}) else said


def _shapes(optimizer: Any) -> tuple[Shapes, set[str]]:
    shapes, types = Counter[tuple[int, ...]](), set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                parallelism.note_mesh(mesh)
            # FSDP1's are shards; what is frozen costs less, and how much is elsewhere is unknown.
            if not parameter.requires_grad or getattr(parameter, "_fsdp_flattened", False):
                return Counter(), set()
            # Of a DTensor (FSDP2) that of the whole.
            shapes[tuple(parameter.shape)] += 1
            types.add(str(parameter.dtype).replace("torch.", ""))
    return (Counter(), set()) if _HIDING & sys.modules.keys() else (shapes, types)


def _has_experts(shapes: Shapes) -> bool:
    """A weight that not every token is multiplied with once: of three dimensions or more (stacked
    experts, convolutions), or one of as many of its shape as the routers beside them have rows (a
    shared expert may be of that shape too)."""
    matrices = [(*shape, count) for shape, count in shapes.items() if len(shape) == 2]
    return any(len(shape) > 2 for shape in shapes) or any(
        rows > 1 and width in (height, length) and rows <= seen / count <= rows + 2
        for rows, width, count in matrices
        for height, length, seen in matrices
    )
