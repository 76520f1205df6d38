"""The places of real ranks over gloo in the meshes of their program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import json, os, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from warpwatch import parallelism
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=4)
found = [parallelism.places()]
init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
found.append(parallelism.places())
init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
found.append(parallelism.places())
dist.new_group([1, 3], group_desc="CONTEXT_PARALLEL_GROUP")
found.append(parallelism.places())
dist.barrier()
print(json.dumps(found))
os._exit(0)
"""


@pytest.mark.torch
@pytest.mark.slow
def test_places_are_those_of_the_meshes(tmp_path: Path) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    before, mesh, both, all_of_them = json.loads(ranks[3].communicate(timeout=120)[0])
    others = [json.loads(rank.communicate(timeout=120)[0]) for rank in ranks[:3]]
    assert before == {}
    assert mesh == {"pipeline": [1, 2], "tensor": [1, 2]}
    assert both == {**mesh, "data": [3, 4]}
    assert all_of_them == {**both, "context": [1, 2]}
    # A rank that is none of the group's.
    assert others[2][3] == {"pipeline": [1, 2], "tensor": [0, 2], "data": [2, 4]}
