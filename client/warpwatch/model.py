"""Finds the rank's place in each kind of parallelism, and counts the trained parameters.

The place comes from the descriptions of process groups: ``mesh_<dimension>`` of a DeviceMesh,
``TENSOR_MODEL_PARALLEL_GROUP`` and similar ones of Megatron-Core (PyTorch 2.4, Megatron-Core 0.9 to
0.16). If a dimension has all ranks, its group is the default one, which has no description: meshes
of sharded parameters and stages of ``torch.distributed.pipelining`` report it. Older versions and
DeepSpeed (0.19) have getters in their modules. The daemon computes an MFU from the parameters: 6
FLOPs per parameter and token.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from typing import Any

# Per kind: its usual names as a dimension of a mesh, and its names in getters. The first of these
# is also in the name of Megatron's group.
_NAMES = {
    "data": (("dp", "data", "data_parallel", "ddp", "batch"), ("data",)),
    "tensor": (("tp", "tensor", "tensor_parallel", "model"), ("tensor_model",)),
    "pipeline": (("pp", "pipe", "pipeline", "pipeline_parallel", "stage"), ("pipeline_model",)),
    "expert": (("ep", "expert", "expert_parallel"), ("expert_model",)),
    "context": (
        ("cp", "context", "context_parallel", "sp", "sequence_parallel"),
        ("context", "sequence"),
    ),
}
# Data parallelism in two dimensions (HSDP), the outer one first.
_DATA = (
    ("mesh_dp_replicate", "mesh_replicate"),
    ("mesh_dp_shard", "mesh_shard", "mesh_fsdp"),
)
_REFRESH_S = 10.0

Place = tuple[int, int]
_noted: dict[str, Place] = {}
_known: tuple[int, float, dict[str, Place]] = (0, 0.0, {})


def note(dimension: str, rank: int, size: int) -> None:
    """Record the place in a dimension that an object of the program reports."""
    _noted[f"mesh_{dimension}"] = rank, size


def note_mesh(mesh: Any) -> None:
    names, here = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
    for dimension, rank, size in zip(names, here, mesh.shape):
        note(dimension, rank, size)


def places(now: float) -> dict[str, Place]:
    """Return (rank, size) in each known kind. ``now`` is monotonic, in seconds.

    The lookup is repeated if the groups have changed, and every 10 s: some groups get their
    description later or replace others.
    """
    global _known
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    groups = getattr(world, "pg_names", None)
    if not groups:
        return {}
    if len(groups) != _known[0] or now >= _known[1]:
        found = {**dict(_by_getters()), **_by_groups(list(groups))}
        _known = len(groups), now + _REFRESH_S, found
    return _known[2]


def _by_groups(groups: list[Any]) -> dict[str, Place]:
    place_by_name = dict(_noted)
    for group in groups:
        with suppress(Exception):  # a group without this rank, or one that is being destroyed
            place_by_name.setdefault(str(group.group_desc), (group.rank(), group.size()))
    found = {}
    for kind, (dimensions, (megatron, *_)) in _NAMES.items():
        names = [*(f"mesh_{name}" for name in dimensions), f"{megatron.upper()}_PARALLEL_GROUP"]
        place = next((place_by_name[name] for name in names if name in place_by_name), None)
        if place is not None:
            found[kind] = place
    outer, inner = (
        next((place_by_name[n] for n in names if n in place_by_name), (0, 1)) for names in _DATA
    )
    if "data" not in found and (outer, inner) != ((0, 1), (0, 1)):
        found["data"] = outer[0] * inner[1] + inner[0], outer[1] * inner[1]
    return found


def _by_getters() -> Iterator[tuple[str, Place]]:
    deepspeed: Any = sys.modules.get("deepspeed.utils.groups")
    megatron = sys.modules.get("megatron.core.parallel_state")
    # DeepSpeed's mpu: the grid of its pipelines, or what Megatron gave it.
    for module in filter(None, (megatron, deepspeed, getattr(deepspeed, "mpu", None))):
        for kind, (_, names) in _NAMES.items():
            for name in names:
                with suppress(Exception):  # not set up, or of another version
                    rank = getattr(module, f"get_{name}_parallel_rank")()
                    size = getattr(module, f"get_{name}_parallel_world_size")()
                    yield kind, (int(rank), int(size))
    with suppress(Exception):  # the largest of several sizes of expert groups
        name = deepspeed._get_max_expert_size_name()
        rank = deepspeed._get_expert_parallel_rank(name)
        size = deepspeed._get_expert_parallel_world_size(name)
        yield "expert", (int(rank), int(size))


# With these libraries an optimizer has only a part of the model: adapters, or shards.
_HIDING = frozenset({"peft", "deepspeed"})

Shapes = Counter[tuple[int, ...]]


class Parameters:
    """The parameters of the optimizers that step in turn; each is examined once."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        # Shapes and types; empty if the optimizer does not have the whole model.
        self._known: weakref.WeakKeyDictionary[Any, tuple[Shapes, set[str]]] = (
            weakref.WeakKeyDictionary()
        )

    def know(self, optimizer: Any) -> bool:
        return optimizer in self._known

    def add(self, optimizer: Any) -> dict[str, Any]:
        """Return the ring's metadata for all optimizers; empty if one is unknown."""
        try:
            self._known[optimizer] = _shapes(optimizer)
        except Exception:
            self._known[optimizer] = Counter(), set()  # an optimizer without the usual attributes
        known = list(self._known.values())
        # Optimizers with equal shapes train copies of a model, or one model twice (meta-learning).
        if len({frozenset(shapes.items()) for shapes, _ in known}) < len(known):
            return {}
        total: Shapes = sum((shapes for shapes, _ in known), Counter())
        if not all(shapes for shapes, _ in known) or _has_experts(total):
            return {}
        metadata: dict[str, Any] = {
            "parameters": sum(prod(shape) * count for shape, count in total.items())
        }
        types = set().union(*(types for _, types in known))
        # Parameters of 32 bits do not show the precision: autocast and TF32 are usual with them.
        if types in ({"bfloat16"}, {"float16"}):
            metadata["precision"] = types.pop()
        return metadata


def _shapes(optimizer: Any) -> tuple[Shapes, set[str]]:
    shapes, types = Counter[tuple[int, ...]](), set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None:
                note_mesh(mesh)
            # FSDP1's parameters are shards. Frozen ones cost fewer FLOPs, how many is unknown.
            if not parameter.requires_grad or getattr(parameter, "_fsdp_flattened", False):
                return Counter(), set()
            # A DTensor (FSDP2) has the shape of the whole parameter.
            shapes[tuple(parameter.shape)] += 1
            types.add(str(parameter.dtype).replace("torch.", ""))
    return (Counter(), set()) if _HIDING & sys.modules.keys() else (shapes, types)


def _has_experts(shapes: Shapes) -> bool:
    """Return whether some weights are not multiplied with every token once.

    Such weights have three dimensions or more (stacked experts, convolutions), or a router fits
    them: it has a row per expert. Up to two shared experts may have the same shape.
    """
    matrices = [(*shape, count) for shape, count in shapes.items() if len(shape) == 2]
    return any(len(shape) > 2 for shape in shapes) or any(
        rows > 1 and width in (height, length) and rows <= seen / count <= rows + 2
        for rows, width, count in matrices
        for height, length, seen in matrices
    )
