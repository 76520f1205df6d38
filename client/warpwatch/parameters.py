"""How many parameters the optimizers train: what 6 FLOPs a parameter and token are counted by."""

from __future__ import annotations

import sys
import weakref
from typing import Any

# With these an optimizer does not hold the model: adapters beside frozen weights, shards.
_HIDING = frozenset({"peft", "deepspeed"})


class Parameters:
    """Of the optimizers that step in turn; each is looked at once."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        # Elements and types; nothing where they are not the whole model.
        self._known: weakref.WeakKeyDictionary[Any, tuple[int, set[str]]] = (
            weakref.WeakKeyDictionary()
        )

    def know(self, optimizer: Any) -> bool:
        return optimizer in self._known

    def add(self, optimizer: Any) -> dict[str, Any]:
        """What the ring's metadata says of all: nothing where one is not known."""
        try:
            self._known[optimizer] = _count(optimizer)
        except Exception:
            self._known[optimizer] = (0, set())  # one of its own kind
        counts = list(self._known.values())
        if not all(count for count, _ in counts):
            return {}
        said: dict[str, Any] = {"parameters": sum(count for count, _ in counts)}
        types = set().union(*(types for _, types in counts))
        # With parameters of 32 bits autocast and TF32 are the rule, and not to be seen.
        return {**said, "precision": types.pop()} if types in ({"bfloat16"}, {"float16"}) else said


def _count(optimizer: Any) -> tuple[int, set[str]]:
    count, types = 0, set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # FSDP1's are shards; what is frozen costs less, and how much is elsewhere is unknown.
            if not parameter.requires_grad or getattr(parameter, "_fsdp_flattened", False):
                return 0, set()
            # Of a DTensor (FSDP2) that of the whole.
            count += parameter.numel()
            types.add(str(parameter.dtype).replace("torch.", ""))
    return (0, set()) if _HIDING & sys.modules.keys() else (count, types)
