"""Runs two gloo ranks for test_hooks_distributed.py; each prints its results as JSON.

Rank 1 comes to every communication once rank 0 waits in it, and a while later by the shim's clock.
"""

import inspect
import json
import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import all_reduce
from torch.distributed._functional_collectives import all_reduce as functional_all_reduce
from torch.distributed._functional_collectives import traceable_collective_remaps, wait_tensor
from torch.nn.parallel import DistributedDataParallel

from tests.waiting import eventually

RANK = int(os.environ["RANK"])
LATE_S = 5.0
# Those of loop_base.py, from ``observe`` on.
FLOW: Any = None
CLOCK: Any = None
found: dict[str, Any] = {}


class OtherRank:
    """Rank 0 as rank 1 sees it, by files in the folder where they meet."""

    def __init__(self, folder: Path) -> None:
        self._about = folder / "rank-0"
        self.spent = folder / "spent"
        self._arrivals = 0

    def arrive(self) -> None:
        """Announce that rank 0 communicates next."""
        self._arrivals += 1
        part = self._about.with_suffix(".part")
        part.write_text(f"{os.getpid()} {self._arrivals}")
        part.rename(self._about)

    def wait(self) -> None:
        """Wait in rank 1 until rank 0 sleeps, as it does only in a communication."""
        self._arrivals += 1
        eventually(self._has_arrived, "the other rank communicates")
        seen = [""]
        # A thread that waits for the interpreter's lock wakes up every 5 ms.
        eventually(lambda: self._sleeps(seen), "the other rank waits", poll_s=0.01)

    def _has_arrived(self) -> bool:
        return self._about.exists() and int(self._about.read_text().split()[1]) >= self._arrivals

    def _sleeps(self, seen: list[str]) -> bool:
        pid = self._about.read_text().split()[0]
        status = Path(f"/proc/{pid}/status").read_text()
        now = status.partition("voluntary_ctxt_switches")[2] if "\nState:\tS" in status else ""
        seen[:] = [*seen, now] if now == seen[-1] != "" else [now]
        return len(seen) > 3


other: OtherRank


def late() -> None:
    if FLOW is None:
        return
    if RANK == 0:
        other.arrive()
    else:
        other.wait()
        CLOCK.spend(LATE_S)


def observe() -> None:
    """With hooks from here on, if there are none yet."""
    global FLOW, CLOCK, found
    from tests.client import loop_base

    FLOW, CLOCK, found = loop_base.state, loop_base.CLOCK, {}
    CLOCK.share(str(other.spent))


def waited_s() -> float:
    if FLOW is None:
        return 0.0
    monitor = FLOW.attach()
    index = monitor.phase("comm").index
    clock = monitor.clock
    return float((clock.totals[index] + clock._words[index]) / 1e9)


def explicit() -> None:
    dist.barrier()
    calls = {
        "all_reduce": lambda: all_reduce(torch.ones(4)),
        "wait": wait_for_work,
        "barrier": dist.barrier,
        "object": lambda: dist.all_gather_object([None, None], RANK),
        "functional": functional,
    }
    for name, call in calls.items():
        before = waited_s()
        late()
        call()
        found[name] = waited_s() - before
        dist.barrier()


def wait_for_work() -> None:
    work = dist.all_reduce(torch.ones(4), async_op=True)
    work.wait()


def functional() -> None:
    assert (functional_all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 0).tolist() == [2.0] * 4


def model() -> torch.nn.Module:
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def train(module: torch.nn.Module, name: str, steps: int = 5) -> None:
    """The losses, and for each step what was waited inside backward."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(RANK)
    losses, waits = [], []
    for _ in range(steps):
        loss = module(torch.randn(8, 16, generator=generator)).square().mean()
        late()
        before = waited_s()
        loss.backward()
        waits.append(waited_s() - before)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item().hex())
    found[name] = {"losses": losses, "waits": waits}


def data_parallel() -> None:
    ddp = DistributedDataParallel(model())
    train(ddp, "ddp")
    before = waited_s()
    with ddp.no_sync():
        ddp(torch.ones(8, 16)).sum().backward()
    found["no_sync"] = waited_s() - before
    found["ddp_hooks"] = [len(p._post_accumulate_grad_hooks or ()) for p in ddp.parameters()]
    # The first layer is frozen: its gradient does not come any more.
    for parameter in ddp.module[0].parameters():
        parameter.requires_grad_(False)
    # A reducer of its own, because this one waits for the gradients that it knew.
    train(DistributedDataParallel(ddp.module), "frozen")


def sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    module = model()
    fully_shard(module[0])
    fully_shard(module)
    before = 0 if FLOW is None else FLOW.monitor.clock.steps
    train(module, "fsdp2")
    found["fsdp2_steps"] = 0 if FLOW is None else FLOW.monitor.clock.steps - before


def compiled() -> None:
    def reduced(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        dist.all_reduce(y)
        return wait_tensor(tensor=y) + 1

    def gathered(x: torch.Tensor) -> torch.Tensor:
        y = torch.empty(2 * len(x))
        dist.all_gather_into_tensor(y, x * 2)
        return y + 1

    torch._dynamo.reset()
    whole = [torch.compile(f, fullgraph=True, backend="aot_eager") for f in (reduced, gathered)]
    found["compiled"] = [function(torch.ones(2)).tolist() for function in whole]


def compiled_data_parallel() -> None:
    from torch._dynamo.utils import counters

    counters.clear()
    ddp: Any = torch.compile(DistributedDataParallel(model()), backend="aot_eager")
    train(ddp, "compiled_ddp")
    breaks, graphs = sum(counters["graph_break"].values()), counters["stats"]["unique_graphs"]
    found["ddp_compilation"] = {"breaks": breaks, "graphs": graphs}


def identity() -> None:
    found["signature"] = str(inspect.signature(dist.all_reduce))
    found["same"] = pickle.loads(pickle.dumps(dist.broadcast)) is dist.broadcast
    found["remapped"] = dist.all_reduce in traceable_collective_remaps

    class Late(dist.Work):  # type: ignore[misc]
        """Without a ``wait`` of its own."""

    try:
        found["derived"] = Late().wait(timedelta(milliseconds=20))
    except RuntimeError as error:
        found["derived"] = type(error).__name__


def both() -> None:
    train(model(), "alone", steps=2)
    explicit()
    compiled()
    identity()


def main(folder: str, hooks: str) -> None:
    """``hooks`` are "early", before torch is imported, or "late": after all was done without."""
    global other
    other = OtherRank(Path(folder))
    if hooks == "early":
        observe()
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=RANK, world_size=2)
    both()
    data_parallel()
    compiled_data_parallel()
    sharded()
    reported = [found]
    if hooks == "late":
        observe()
        both()
        reported.append(found)
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(reported), flush=True)
    os._exit(0)
