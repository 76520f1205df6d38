"""The places of real ranks over gloo in the meshes of their program, and by what getters say."""

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.client.fork_server import ForkServer
from warpwatch import model

PROGRAM = """
import json, os, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from warpwatch import model
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=4)
found = [model.places(0)]
init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
found.append(model.places(10))
init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
found.append(model.places(20))
dist.new_group([1, 3], group_desc="CONTEXT_PARALLEL_GROUP")
found.append(model.places(30))
model.note_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("ep",)))
found.append(model.places(40))
dist.barrier()
print(json.dumps(found))
os._exit(0)
"""


@pytest.mark.torch
@pytest.mark.loops
def test_places_are_those_of_the_meshes(with_torch: ForkServer, tmp_path: Path) -> None:
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    store = str(tmp_path / "store")
    ranks = [with_torch.fork(PROGRAM, str(rank), store, environ=environ) for rank in range(4)]
    *others, (before, mesh, both, all_of_them, world) = [
        json.loads(rank.communicate()[0]) for rank in ranks
    ]
    for rank in ranks:
        rank.kill()
    assert before == {}
    assert mesh == {"pipeline": [1, 2], "tensor": [1, 2]}
    assert both == {**mesh, "data": [3, 4]}
    assert all_of_them == {**both, "context": [1, 2]}
    # The group of all ranks says nothing of its kind.
    assert world == {**all_of_them, "expert": [3, 4]}
    # A rank outside the group.
    assert others[2][3] == {"pipeline": [1, 2], "tensor": [0, 2], "data": [2, 4]}


def asked(monkeypatch: pytest.MonkeyPatch, **modules: Any) -> dict[str, Any]:
    """In a program with a group that says nothing; a dot in a module's name is ``__``."""
    c10d = SimpleNamespace(_world=SimpleNamespace(pg_names={ModuleType("group"): "0"}))
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
