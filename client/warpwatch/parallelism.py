"""Where this rank stands in each kind of parallelism: what the program's process groups say.

A group of a DeviceMesh is described as ``mesh_<dimension>``, Megatron-Core's as
``TENSOR_MODEL_PARALLEL_GROUP`` and the like (PyTorch 2.4, Megatron-Core 0.9 to 0.16). A dimension
of all ranks is the default group, which says nothing: meshes of sharded parameters and stages of
``torch.distributed.pipelining`` tell it. Before these, and for DeepSpeed's (0.19), the getters of
their modules answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Per kind its usual names as dimension of a mesh, and in the getters and Megatron's groups.
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
# Data parallelism in two dimensions (HSDP), the outer one first. Context may be part of the inner.
_DATA = (
    ("mesh_dp_replicate", "mesh_replicate"),
    ("mesh_dp_shard", "mesh_shard", "mesh_fsdp"),
)
_LOOK_AGAIN_S = 10.0

Place = tuple[int, int]
_noted: dict[str, Place] = {}
_known: tuple[int, float, dict[str, Place]] = (0, 0.0, {})


def note(dimension: str, rank: int, size: int) -> None:
    """What a program makes says of its dimension of a mesh."""
    _noted[f"mesh_{dimension}"] = rank, size


def note_mesh(mesh: Any) -> None:
    names, here = mesh.mesh_dim_names or (), mesh.get_coordinate() or ()
    for dimension, rank, size in zip(names, here, mesh.shape):
        note(dimension, rank, size)


def places(now: float) -> dict[str, Place]:
    """(rank, size) in each kind that is known. Looked up again once the groups have changed, and
    now and then: some are said of what kind they are later, or take the place of others. ``now`` is
    monotonic, in seconds."""
    global _known
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    groups = getattr(world, "pg_names", None)
    if not groups:
        return {}
    if len(groups) != _known[0] or now >= _known[1]:
        found = {**dict(_by_getters()), **_by_groups(list(groups))}
        _known = len(groups), now + _LOOK_AGAIN_S, found
    return _known[2]


def _by_groups(groups: list[Any]) -> dict[str, Place]:
    said = dict(_noted)
    for group in groups:
        with suppress(Exception):  # a group without this rank, or one that is being destroyed
            said.setdefault(str(group.group_desc), (group.rank(), group.size()))
    found = {}
    for kind, (dimensions, (megatron, *_)) in _NAMES.items():
        names = [*(f"mesh_{name}" for name in dimensions), f"{megatron.upper()}_PARALLEL_GROUP"]
        place = next((said[name] for name in names if name in said), None)
        if place is not None:
            found[kind] = place
    outer, inner = (next((said[n] for n in names if n in said), (0, 1)) for names in _DATA)
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
    with suppress(Exception):  # of layers of experts of several sizes the largest
        name = deepspeed._get_max_expert_size_name()
        rank = deepspeed._get_expert_parallel_rank(name)
        size = deepspeed._get_expert_parallel_world_size(name)
        yield "expert", (int(rank), int(size))
