"""Where this rank stands in each kind of parallelism: what the program's process groups say.

A group of a DeviceMesh is described as ``mesh_<dimension>``, Megatron-Core's as
``TENSOR_MODEL_PARALLEL_GROUP`` and the like (PyTorch 2.4, Megatron-Core 0.9). Before these, and for
DeepSpeed's, the getters of their modules answer.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Per kind its usual names as dimension of a mesh, and in Megatron's groups and getters.
_NAMES = {
    "data": (("dp", "data", "data_parallel", "ddp", "fsdp"), "data"),
    "tensor": (("tp", "tensor", "tensor_parallel", "model"), "tensor_model"),
    "pipeline": (("pp", "pipe", "pipeline", "pipeline_parallel", "stage"), "pipeline_model"),
    "expert": (("ep", "expert", "expert_parallel"), "expert_model"),
    "context": (("cp", "context", "context_parallel", "sp"), "context"),
}
# Data parallelism in two dimensions (HSDP), the outer one first.
_DATA = ("mesh_dp_replicate", "mesh_replicate"), ("mesh_dp_shard", "mesh_shard")
_GETTERS = ("megatron.core.parallel_state", "deepspeed.utils.groups")

Place = tuple[int, int]
_known: tuple[int, dict[str, Place]] = (0, {})


def places() -> dict[str, Place]:
    """(rank, size) in each kind that is known. Looked up again once the groups have changed."""
    global _known
    module = sys.modules.get("torch.distributed.distributed_c10d")
    world = getattr(module, "_world", None)
    groups = getattr(world, "pg_names", None)
    if not groups:
        return {}
    if len(groups) != _known[0]:
        _known = len(groups), {**dict(_by_getters()), **_by_groups(list(groups))}
    return _known[1]


def _by_groups(groups: list[Any]) -> dict[str, Place]:
    said: dict[str, Place] = {}
    for group in groups:
        with suppress(Exception):  # a group without this rank, or one that is being destroyed
            said.setdefault(str(group.group_desc), (group.rank(), group.size()))
    found = {}
    for kind, (dimensions, megatron) in _NAMES.items():
        names = [*(f"mesh_{name}" for name in dimensions), f"{megatron.upper()}_PARALLEL_GROUP"]
        place = next((said[name] for name in names if name in said), None)
        if place is not None:
            found[kind] = place
    outer, inner = (next((said[n] for n in names if n in said), (0, 1)) for names in _DATA)
    if "data" not in found and (outer, inner) != ((0, 1), (0, 1)):
        found["data"] = outer[0] * inner[1] + inner[0], outer[1] * inner[1]
    return found


def _by_getters() -> Iterator[tuple[str, Place]]:
    for module in filter(None, map(sys.modules.get, _GETTERS)):
        for kind, (_, name) in _NAMES.items():
            with suppress(Exception):  # not set up, or of another version
                rank = getattr(module, f"get_{name}_parallel_rank")()
                yield kind, (int(rank), int(getattr(module, f"get_{name}_parallel_world_size")()))
