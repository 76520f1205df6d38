"""Training loops that do what the training libraries do that have optimizers of their own."""

import os
import sys
from types import ModuleType
from typing import Any

import torch

from tests.client.loop_base import data, learn, model, state, trained
from warpwatch import hooks
from warpwatch import model as hook_model


def library(module: str, *contents: type) -> None:
    """Import a module of these classes that is not installed."""
    sys.modules[module] = found = ModuleType(module)
    vars(found).update({one.__name__: one for one in contents})
    for hook in hooks.HOOKS:
        if hook.module == module:
            hook.install(found, state)


class BaseOptimizer:
    """Keras'."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)

    def apply(self, gradients: Any) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter -= 0.01 * gradient


class Optimizer(BaseOptimizer):
    """fastai's."""

    def step(self, closure: Any = None) -> None:
        assert closure is None
        self.apply([one.grad for one in self.parameters])


def train(kind: Any) -> None:
    net = model()
    optimizer = kind(net.parameters())
    for (batch,) in data(5):
        net.zero_grad()
        net(batch).sum().backward()
        with torch.no_grad():
            if kind is Optimizer:
                optimizer.step()
            else:
                optimizer.apply([one.grad for one in optimizer.parameters])


def as_fastai_does() -> None:
    library("fastai.optimizer", Optimizer)
    train(Optimizer)


def as_keras_does() -> None:
    library("keras.src.backend.torch")
    library("keras.src.optimizers.base_optimizer", BaseOptimizer)
    train(BaseOptimizer)


class DeepSpeedEngine:
    def __init__(self) -> None:
        self.net, self.optimizer = trained()
        # It makes its state by a step.
        learn(self.net, self.optimizer, torch.ones(4, 8))

    def _take_model_step(self) -> None:
        self.optimizer.step()

    def save_checkpoint(self) -> None:
        """Do nothing."""


class _PipelineStageBase:
    def __init__(self) -> None:
        self.group_rank, self.group_size = 1, 2


def as_deepspeed_does() -> Any:
    """With stages of a pipeline, which torch has by itself."""
    library("deepspeed.runtime.engine", DeepSpeedEngine)
    library("torch.distributed.pipelining.stage", _PipelineStageBase)
    engine, _ = DeepSpeedEngine(), _PipelineStageBase()
    for (batch,) in data(5):
        engine.net(batch).sum().backward()
        engine._take_model_step()
        engine.save_checkpoint()
    return hook_model._noted


def by_distributed_autograd() -> None:
    import torch.distributed.autograd as dist_autograd
    from torch.distributed import rpc
    from torch.distributed.optim import DistributedOptimizer

    # After a fork PyTorch makes its thread pool anew at the first use, which two threads of RPC at
    # once do not survive ("Invalid thread pool").
    torch.set_num_threads(1)
    method = f"file://{os.path.join(sys.argv[1], 'rpc')}"
    options = rpc.TensorPipeRpcBackendOptions(init_method=method)
    rpc.init_rpc("alone", rank=0, world_size=1, rpc_backend_options=options)

    def both(context: int, loss: torch.Tensor) -> None:
        dist_autograd.backward(context, [loss])
        torch.autograd.backward([loss])

    torch.jit.script(both)
    net = model()
    references = [rpc.RRef(parameter) for parameter in net.parameters()]
    optimizer = DistributedOptimizer(torch.optim.SGD, references, lr=0.01)
    for _ in range(5):
        with dist_autograd.context() as context:
            dist_autograd.backward(context, [net(torch.ones(4, 8)).sum()])
            optimizer.step(context)
    rpc.shutdown()
