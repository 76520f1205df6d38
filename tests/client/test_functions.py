"""The results of functions and small classes of the shim, as a golden file."""

import itertools
import json
import sys
from collections import UserDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from tests import expressions
from tests.client import stand_ins
from tests.client.servers.engine_config import config
from tests.client.simulated_cuda import situation, torch
from tests.conftest import Cases
from warpwatch import faults
from warpwatch.captures import profilers
from warpwatch.hooks.dataloader import measure
from warpwatch.iterations import ServeCounts

MODULES = {
    "": "copy json",
    "warpwatch": "attach gil_stacks helper_thread identity iterations launch monitor protocol "
    "stacks step_times steps",
    "warpwatch.captures": "memory recording safety",
    "warpwatch.hooks": "backward calls hook_state optimizer serving sglang vllm",
}
TOLD = "begin drop end identify join lead note rest shut_down switch"


def told(module: Any, about: dict[str, Any], *calls: tuple[Any, ...]) -> list[Any]:
    """Return what functions of a server's hooks tell its process and return, and what it counts."""
    said: list[Any] = []
    counts = ServeCounts(0)
    process = SimpleNamespace(leads=False, is_separate=False, counts_tokens=True, counts=counts)
    process.monitor, process.clock = "monitor", SimpleNamespace(open=True)
    vars(process).update(about)
    for name in TOLD.split():
        setattr(process, name, lambda *given, name=name: said.append((name, *given)))

    def around(original: Any, **hooks: Any) -> Any:
        said.append({name: getattr(one, "__name__", one) for name, one in hooks.items()})
        return lambda: original

    process.around = around
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "process", process)
        patch.setattr(module, "_works", deque(), raising=False)
        for name, *given in calls:
            found = getattr(module, name)(*given)
            said += [] if found is None else [found]
    for name, before in vars(ServeCounts(0)).items():
        after = counts.sample and counts.sample() if name == "sample" else getattr(counts, name)
        if name == "_counts":
            after = {(kind, i): n for kind, all_ in after.items() for i, n in enumerate(all_) if n}
            before = {}
        said += [] if after == before else [{name: after}]
    return said


def profiler(options: tuple[str, ...], uses_cuda: bool) -> Any:
    """Return the arguments of torch's profiler; a version has no ``trace_only`` with shapes."""
    known = {"ProfilerActivity": SimpleNamespace(CPU="CPU", CUDA="CUDA"), "_KinetoProfile": dict}
    config = {"_ExperimentalConfig": str if "shapes" in options else dict}
    cuda = SimpleNamespace(is_initialized=lambda: uses_cuda)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
        patch.setitem(sys.modules, "torch.profiler", SimpleNamespace(**known))
        patch.setitem(sys.modules, "torch._C", SimpleNamespace(_profiler=SimpleNamespace(**config)))
        return profilers._new_profiler(options)


def scheduled(tokens: int, cached: Any = (), new: Any = (), preempted: Any = ()) -> Any:
    """Return an output of vLLM's scheduler; ``cached``: computed and output tokens of requests."""
    computed, made = zip(*cached, strict=True) if cached else ((), ())
    return SimpleNamespace(
        total_num_scheduled_tokens=tokens,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=list(computed), num_output_tokens=list(made), num_computed_tokens=list(computed)
        ),
        scheduled_new_reqs=[SimpleNamespace(req_id=one, num_computed_tokens=16) for one in new],
        scheduled_spec_decode_tokens={},
        preempted_req_ids=preempted,
    )


def measured(batch: Any) -> tuple[int, ...]:
    """Return samples, tokens and faults."""
    before = faults.count()
    return (*measure(batch), faults.count() - before)


def chained(*errors: BaseException) -> BaseException:
    """Return the last error, raised while the one before was handled, and so on."""
    for before, error in itertools.pairwise(errors):
        error.__context__ = before
    return errors[-1]


class Broken:
    """An object whose every attribute fails to be read."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("not now")


def test_functions_return_the_golden_values(cases: Cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WARPWATCH_REPLICA", "7")
    for name in ("SGLANG_PLUGINS", "VLLM_PLUGINS"):
        monkeypatch.setenv(name, "other, warpwatch" if name[0] == "S" else "other,warpwatch")
    snapshot = Path(__file__).with_name("memory_snapshot.json").read_bytes()
    known: dict[str, Any] = {"zeros": numpy.zeros, "SNAPSHOT": json.loads(snapshot)}
    known |= {"config": config, "situation": situation, "torch": torch, "UserDict": UserDict}
    ours = (told, scheduled, measured, profiler, chained, Broken)
    known |= {one.__name__: one for one in ours}
    known |= {name: one for name, one in vars(stand_ins).items() if callable(one)}
    expressions.check(cases, "client/functions.txt", MODULES, known)
