"""The places of a rank, by the descriptions of its groups and by what getters say."""

import sys
from collections.abc import Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.cases import cases
from warpwatch import model


class Group:
    """A process group as torch describes it; ``rank`` raises in a process outside of it."""

    def __init__(self, group_desc: str, rank: int | None = None, size: int = 2) -> None:
        self.group_desc, self._rank, self._size = group_desc, rank, size

    def rank(self) -> int:
        if self._rank is None:
            raise ValueError("not in the group")
        return self._rank

    def size(self) -> int:
        return self._size


# The meshes of real ranks are those of the shapes of programs.
@pytest.mark.parametrize(("groups", "places"), cases(__file__)["places"])
def test_places_are_those_of_the_groups_and_meshes(
    groups: list[Any], places: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [Group(*group) for group in groups]
    places = {kind: tuple(place) for kind, place in places.items()}
    assert asked(monkeypatch, groups) == places
    # The group of all ranks says nothing of its kind: a mesh of its parameters does.
    mesh = SimpleNamespace(mesh_dim_names=("ep",), shape=(4,), get_coordinate=lambda: [3])
    monkeypatch.setattr(model, "_noted", {})
    model.note_mesh(mesh)
    # This rank is not in the other one.
    model.note_mesh(
        SimpleNamespace(mesh_dim_names=("pp",), shape=(2,), get_coordinate=lambda: None)
    )
    assert asked(monkeypatch, groups) == {**places, "expert": (3, 4)}


def asked(
    monkeypatch: pytest.MonkeyPatch, groups: Iterable[Any] = (Group("undefined"),), **modules: Any
) -> dict[str, Any]:
    """In a program with a group that says nothing; a dot in a module's name is ``__``."""
    c10d = SimpleNamespace(_world=SimpleNamespace(pg_names=dict.fromkeys(groups, "0")))
    monkeypatch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)
    monkeypatch.setattr(model, "_known", (0, 0.0, {}))
    return model.places(0.0)


def getters(**places: tuple[int, int]) -> ModuleType:
    """``get_<name>_rank`` and ``get_<name>_world_size`` by name."""
    module = ModuleType("getters")
    for name, (rank, size) in places.items():
        setattr(module, f"get_{name}_rank", lambda rank=rank: rank)
        setattr(module, f"get_{name}_world_size", lambda size=size: size)
    return module


def test_getters_answer_where_the_groups_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    # Before PyTorch 2.4 groups have no description.
    found = asked(
        monkeypatch,
        megatron__core__parallel_state=getters(
            data_parallel=(1, 2), tensor_model_parallel=(0, 4), pipeline_model_parallel=(2, 3),
            expert_model_parallel=(1, 8), context_parallel=(0, 1), expert_tensor_parallel=(3, 9),
        ),
    )  # fmt: skip
    assert found == {
        "data": (1, 2), "tensor": (0, 4), "pipeline": (2, 3), "expert": (1, 8), "context": (0, 1),
    }  # fmt: skip


def test_places_are_looked_up_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "megatron__core__parallel_state"
    assert asked(monkeypatch, **{name: getters(data_parallel=(1, 2))}) == {"data": (1, 2)}
    monkeypatch.setitem(sys.modules, name.replace("__", "."), getters(context_parallel=(0, 2)))
    assert model.places(9.9) == {"data": (1, 2)}
    assert model.places(10.0) == {"context": (0, 2)}
    # At once if there is another group, which says more than getters.
    c10d = sys.modules["torch.distributed.distributed_c10d"]
    c10d._world.pg_names[Group("mesh_cp", 1)] = "1"
    assert model.places(10.1) == {"context": (1, 2)}


def test_deepspeed_says_it_by_grid_sequences_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: Any = ModuleType("groups")

    def get_tensor_model_parallel_rank() -> int:
        raise AssertionError("intra_layer_model parallel group is not initialized")

    groups.get_tensor_model_parallel_rank = get_tensor_model_parallel_rank
    groups.mpu = None
    assert asked(monkeypatch, deepspeed__utils__groups=groups) == {}
    groups.mpu = getters(data_parallel=(1, 2), pipeline_model_parallel=(1, 4))
    assert asked(monkeypatch) == {"data": (1, 2), "pipeline": (1, 4)}
    groups.mpu = getters(sequence_parallel=(1, 2))
    assert asked(monkeypatch) == {"context": (1, 2)}
    groups.mpu = None
    groups._get_max_expert_size_name = lambda: "ep_size_4"
    groups._get_expert_parallel_rank = {"ep_size_4": 3}.__getitem__
    groups._get_expert_parallel_world_size = {"ep_size_4": 4}.__getitem__
    assert asked(monkeypatch) == {"expert": (3, 4)}
