"""The shapes of programs on several ranks, which talk by gloo. Each returns one rank's losses."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from tests.client.loop_base import PLACES
from tests.client.shapes import BATCH, WIDTH, loader, network
from warpwatch import model

Train = Callable[..., Iterator[float]]


def in_ranks(size: int = 2, told: int = 0) -> Callable[[Train], Callable[..., list[float]]]:
    """Run a program in ``size`` forked processes. Return the losses of this rank."""

    def start(train: Train, *arguments: Any) -> list[float]:
        meet = f"file://{sys.argv[1]}/meet-{os.getpid()}"
        os.environ.update(WORLD_SIZE=str(size), GLOO_SOCKET_IFNAME="lo")
        others = []
        for rank in (rank for rank in range(size) if rank != told):
            child = os.fork()
            if child == 0:
                failed = 1
                try:
                    join(train(*arguments), meet, rank)
                    failed = 0
                finally:
                    os._exit(failed)
            others.append(child)
        losses = join(train(*arguments), meet, told)
        assert [os.waitpid(child, 0)[1] for child in others] == [0] * len(others)
        return losses

    def join(train: Iterator[float], meet: str, rank: int) -> list[float]:
        os.environ["RANK"] = os.environ["LOCAL_RANK"] = str(rank)
        dist.init_process_group("gloo", init_method=meet, rank=rank, world_size=size)
        losses = list(train)
        PLACES.update(model.places(0.0))
        dist.barrier()
        dist.destroy_process_group()
        return losses

    return lambda train: partial(start, train)


def shard(batches: int) -> DataLoader[Any]:
    rows = loader(2 * batches).dataset
    return DataLoader(rows, BATCH, sampler=DistributedSampler(rows))


@in_ranks()
def ddp_accumulation() -> Iterator[float]:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(network(WIDTH, 2 * WIDTH, WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for number, (x, y) in enumerate(shard(40), 1):
        is_last = number % 4 == 0
        with contextlib.nullcontext() if is_last else model.no_sync():
            loss = F.mse_loss(model(x), y)
            (loss / 4).backward()
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()


@in_ranks()
def fsdp2() -> Iterator[float]:
    """torchtitan: each block sharded, then the root; steps of one batch, gradients clipped."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = network(WIDTH, 4 * WIDTH, 4 * WIDTH, 1)
    for block in model[::2]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for x, y in shard(20):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss.item()


def in_two_directions(*shards: int) -> Iterator[float]:
    """Both ranks of a shard have the same rows. torchtitan also splits blocks into shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import parallel

    torch.manual_seed(0)
    names = ("dp_shard", "tp") if shards else ("tp",)
    mesh = init_device_mesh("cpu", (*shards, 2), mesh_dim_names=names)
    plan = {"0": parallel.ColwiseParallel(), "2": parallel.RowwiseParallel()}
    model = parallel.parallelize_module(network(WIDTH, 8 * WIDTH, WIDTH), mesh["tp"], plan)
    if shards:
        fully_shard(model, mesh=mesh["dp_shard"])
        torch.manual_seed(mesh["dp_shard"].get_local_rank())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    x = torch.randn(4 * BATCH, WIDTH)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()


tensor_parallel = in_ranks()(in_two_directions)
torchtitan = partial(in_ranks(4)(in_two_directions), 2)


@in_ranks(told=1)
def pipeline_parallel() -> Iterator[float]:
    """Two stages, four micro-batches a step. The last stage has the loss."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank = dist.get_rank()
    torch.manual_seed(0)
    stages = network(WIDTH, 4 * WIDTH, WIDTH), network(WIDTH, 4 * WIDTH, 1)
    stage = PipelineStage(stages[rank], rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss)
    optimizer = torch.optim.AdamW(stages[rank].parameters(), lr=1e-3)
    x = torch.randn(4 * BATCH, WIDTH)
    for _ in range(40):
        parts: list[Any] = []
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=x.square().mean(1, keepdim=True), losses=parts)
        optimizer.step()
        optimizer.zero_grad()
        yield sum(part.item() for part in parts)


@in_ranks(4, told=3)
def megatron() -> Iterator[float]:
    """Megatron-Core's groups, and its collectives around the two halves of a layer."""
    parallel_state: Any = import_module("megatron.core.parallel_state")
    mappings: Any = import_module("megatron.core.tensor_parallel.mappings")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    torch.manual_seed(parallel_state.get_tensor_model_parallel_rank())
    up, down = network(WIDTH, 4 * WIDTH), network(4 * WIDTH, WIDTH)
    optimizer = torch.optim.AdamW([*up.parameters(), *down.parameters()], lr=1e-3)
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
        yield loss.item()


@in_ranks(4, told=3)
def deepspeed() -> Iterator[float]:
    """Two stages of two ranks each, four micro-batches a step."""
    with contextlib.redirect_stdout(sys.stderr):
        engines: Any = import_module("deepspeed")
        engines.init_distributed("gloo")
        torch.manual_seed(0)
        layers = [*network(WIDTH, 4 * WIDTH, WIDTH, 1)]
        model = engines.pipe.PipelineModule(layers, num_stages=2, loss_fn=F.mse_loss)
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": 4,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        }
        parameters = model.parameters()
        engine, *_ = engines.initialize(model=model, model_parameters=parameters, config=config)
        rows = iter(loader(20 * 4))
        for _ in range(20):
            yield engine.train_batch(rows).item()
