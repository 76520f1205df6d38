"""Stand-ins for process groups and optimizers, and what the shim finds out about them."""

import gc
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from warpwatch import model


class Group:
    """A process group as torch describes it; ``rank`` raises in a process outside of it."""

    def __init__(self, group_desc: str, rank: int | None = None, size: int = 2) -> None:
        self.group_desc, self._rank, self.size = group_desc, rank, lambda: size

    def rank(self) -> int:
        if self._rank is None:
            raise ValueError("not in the group")
        return self._rank


def mesh(dimension: str, rank: int | None, size: int) -> Any:
    """Return a DeviceMesh of one dimension; ``rank`` is None in a process outside of it."""
    here = None if rank is None else [rank]
    return SimpleNamespace(mesh_dim_names=(dimension,), shape=(size,), get_coordinate=lambda: here)


def getters(**places: tuple[int, int]) -> Any:
    """``get_<name>_parallel_rank`` and ``get_<name>_parallel_world_size`` by name."""
    module: Any = SimpleNamespace(mpu=None)
    for name, (rank, size) in places.items():
        setattr(module, f"get_{name}_parallel_rank", lambda rank=rank: rank)
        setattr(module, f"get_{name}_parallel_world_size", lambda size=size: size)
    return module


def places(*lookups: tuple[float, list[Group], dict[str, Any]], meshes: Any = ()) -> list[Any]:
    """Return the places at each lookup: its time, the groups and modules there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_known", (0, 0.0, {}))
        patch.setattr(model, "_noted", {})
        for one in meshes:
            model.note_mesh(one)
        found: list[Any] = []
        for now, groups, modules in lookups:
            c10d = SimpleNamespace(_world=SimpleNamespace(pg_names=dict.fromkeys(groups, "0")))
            patch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            found.append(model.places(now))
        return found


def weight(*shape: int, dtype: str = "float32", trains: bool = True, **more: Any) -> Any:
    return SimpleNamespace(shape=shape, dtype=f"torch.{dtype}", requires_grad=trains, **more)


class Optimizer:
    def __init__(self, *weights: Any) -> None:
        self.param_groups = [{"params": weights}]


def parameters(*optimizers: Any, library: str = "none", drop: int = -1) -> list[Any]:
    """Return what is said after each optimizer; that number ``drop`` is deleted after its step."""
    kept, known, said = list(optimizers), model.Parameters(), list[Any]()
    del optimizers
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, library, None)
        noted: dict[str, Any] = {}
        patch.setattr(model, "_noted", noted)
        for number in range(len(kept)):
            said.append(known.add(kept[number]))
            assert known.know(kept[number])
            if number == drop:
                kept[number] = None
                gc.collect()
    return [*said, noted] if noted else said
