"""A configuration of vLLM as far as the hooks read it."""

from types import SimpleNamespace
from typing import Any


def config(**parallel: Any) -> Any:
    said = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "world_size": 1,
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "distributed_executor_backend": "uni",
    }
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**said | parallel),
        model_config=SimpleNamespace(served_model_name=["tiny", "other"]),
        instance_id="start1",
    )
