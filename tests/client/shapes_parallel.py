"""The shapes of programs on several ranks, which talk by gloo. Each returns one rank's losses."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from tests.client.loop_base import PLACES
from tests.client.shapes import BATCH, WIDTH, loader, network
from warpwatch import parallelism


def in_ranks(train: Callable[[], list[float]], told: int = 0, size: int = 2) -> list[float]:
    """Of ``size`` forked processes this one is the rank whose losses are ``told``."""
    meet = f"file://{sys.argv[1]}/meet-{os.getpid()}"
    os.environ.update(WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo")
    others = []
    for rank in (rank for rank in range(size) if rank != told):
        child = os.fork()
        if child == 0:
            failed = 1
            try:
                _join(train, meet, rank, size)
                failed = 0
            finally:
                os._exit(failed)
        others.append(child)
    losses = _join(train, meet, told, size)
    assert [os.waitpid(child, 0)[1] for child in others] == [0] * len(others)
    return losses


def _join(train: Callable[[], list[float]], meet: str, rank: int, size: int) -> list[float]:
    os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
    dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
    losses = train()
    PLACES.update(parallelism.places(0.0))
    dist.barrier()
    dist.destroy_process_group()
    return losses


def shard(batches: int) -> DataLoader[Any]:
    rows = loader(2 * batches).dataset
    return DataLoader(rows, BATCH, sampler=DistributedSampler(rows))


def ddp_accumulation() -> list[float]:
    def train() -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.parallel.DistributedDataParallel(network(WIDTH, 2 * WIDTH, WIDTH, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for number, (x, y) in enumerate(shard(40), 1):
            is_last = number % 4 == 0
            with contextlib.nullcontext() if is_last else model.no_sync():
                loss = F.mse_loss(model(x), y)
                (loss / 4).backward()
            if is_last:
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses

    return in_ranks(train)


def fsdp2() -> list[float]:
    """torchtitan: each block sharded, then the root; steps of one batch, gradients clipped."""
    from torch.distributed.fsdp import fully_shard

    def train() -> list[float]:
        torch.manual_seed(0)
        model = network(WIDTH, 4 * WIDTH, 4 * WIDTH, 1)
        for block in model[::2]:
            fully_shard(block)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses = []
        for x, y in shard(20):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
        return losses

    return in_ranks(train)


def tensor_parallel() -> list[float]:
    """Both ranks have the same rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def train() -> list[float]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(network(WIDTH, 8 * WIDTH, WIDTH), mesh, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
        losses = []
        x = torch.randn(4 * BATCH, WIDTH)
        for _ in range(30):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return in_ranks(train)


def pipeline_parallel() -> list[float]:
    """Two stages, four micro-batches a step. The last stage has the loss."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    def train() -> list[float]:
        rank = dist.get_rank()
        torch.manual_seed(0)
        stages = network(WIDTH, 4 * WIDTH, WIDTH), network(WIDTH, 4 * WIDTH, 1)
        stage = PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
        schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
        optimizer = torch.optim.AdamW(stages[rank].parameters(), lr=1e-3)
        losses = []
        x = torch.randn(4 * BATCH, WIDTH)
        for _ in range(40):
            parts: list[Any] = []
            if rank == 0:
                schedule.step(x)
            else:
                schedule.step(target=x.square().mean(1, keepdim=True), losses=parts)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(sum(part.item() for part in parts))
        return losses

    return in_ranks(train, told=1)


def torchtitan() -> list[float]:
    """Blocks split in two directions: tensor parallel inside of a shard."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    def train() -> list[float]:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(network(WIDTH, 8 * WIDTH, WIDTH), mesh["tp"], plan)
        fully_shard(model, mesh=mesh["dp_shard"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.manual_seed(mesh["dp_shard"].get_local_rank())
        losses = []
        x = torch.randn(4 * BATCH, WIDTH)
        for _ in range(20):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return in_ranks(train, size=4)


def megatron() -> list[float]:
    """Megatron-Core's groups, and its collectives around the two halves of a layer."""
    parallel_state: Any = import_module("megatron.core.parallel_state")
    mappings: Any = import_module("megatron.core.tensor_parallel.mappings")

    def train() -> list[float]:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
        torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
        up, down = network(WIDTH, 4 * WIDTH), network(4 * WIDTH, WIDTH)
        optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()], lr=1e-3)
        losses = []
        torch.manual_seed(parallel_state.get_data_parallel_rank())
        for x, _ in loader(30):
            hidden = up(mappings.copy_to_tensor_model_parallel_region(x)).relu()
            given = mappings.reduce_from_tensor_model_parallel_region(down(hidden))
            loss = given.square().mean()
            loss.backward()
            for parameter in (*up.parameters(), *down.parameters()):
                dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    return in_ranks(train, told=3, size=4)


def deepspeed_pipeline() -> list[float]:
    """Two stages of two ranks each, four micro-batches a step."""
    with contextlib.redirect_stdout(sys.stderr):
        engines: Any = import_module("deepspeed")
        pipe: Any = import_module("deepspeed.pipe")
        return in_ranks(lambda: _pipeline(engines, pipe), told=3, size=4)


def deepspeed_zero() -> list[float]:
    """Gradients and the optimizer's state sharded, two batches a step."""
    with contextlib.redirect_stdout(sys.stderr):
        engines: Any = import_module("deepspeed")

        def train() -> list[float]:
            engines.init_distributed("gloo")
            torch.manual_seed(0)
            model = network(WIDTH, 4 * WIDTH, WIDTH, 1)
            config = {
                "train_micro_batch_size_per_gpu": BATCH,
                "gradient_accumulation_steps": 2,
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
                "zero_optimization": {"stage": 2},
            }
            engine, *_ = engines.initialize(
                model=model, model_parameters=model.parameters(), config=config
            )
            losses = []
            for number, (x, y) in enumerate(shard(40), 1):
                loss = F.mse_loss(engine(x), y)
                engine.backward(loss)
                engine.step()
                if number % 2 == 0:
                    losses.append(loss.item())
            return losses

        return in_ranks(train)


def _pipeline(engines: Any, pipe: Any) -> list[float]:
    engines.init_distributed("gloo")
    torch.manual_seed(0)
    model = pipe.PipelineModule(
        [*network(WIDTH, 4 * WIDTH, WIDTH, 1)], num_stages=2, loss_fn=F.mse_loss
    )
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = engines.initialize(model=model, model_parameters=model.parameters(), config=config)
    rows = iter(loader(20 * 4))
    return [engine.train_batch(rows).item() for _ in range(20)]
