"""Hooks of vLLM, which finds them by its entry points ``vllm.general_plugins``.

vLLM calls ``install`` in the front end, in the engine before its scheduler exists and in each
worker, maybe more than once. A class is hooked when its module has been imported. Its clock: an
iteration of the engine lasts from one ``update_from_output`` to the next, or after idle from its
own ``schedule``. An iteration of a worker lasts from the end of one ``sample_tokens`` to the next.
Steps without tokens do not count.

Versions: tried with 0.32.0. With another one the status reports a missing class or method.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from functools import partial, wraps
from operator import attrgetter
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.hooks.import_watcher import ImportWatcher
from warpwatch.hooks.serving import ServerProcess

NAME = "warpwatch"
_NEW_TOKENS, _PREFILL_STATS = attrgetter("new_token_ids"), attrgetter("prefill_stats")

process = ServerProcess()


def install() -> None:
    """Install the hooks in this process; vLLM's plug-in function."""
    if not process.starts("vllm"):
        return
    try:
        _watch(_HOOKS | _FRONT_END_HOOKS)
    except Exception as error:
        faults.swallow(error)


def watch_plugins() -> None:
    """Report it in the status if ``VLLM_PLUGINS`` leaves these hooks out."""
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and NAME not in allowed.split(","):
        process.note(f"VLLM_PLUGINS leaves {NAME} out: add it to see iterations and latencies")
        _watch(_FRONT_END_HOOKS)


def _watch(hooks: Mapping[str, Callable[[ModuleType], None]]) -> None:
    process.identify("vllm")
    watcher = ImportWatcher()
    for module, hook in hooks.items():
        watcher.want(module, hook)
    watcher.install()


def _fits(owner: Any, *names: str) -> bool:
    """Return whether the class has these methods; otherwise report that the hook does not fit."""
    missing = [name for name in names if not callable(getattr(owner, name, None))]
    if missing:
        process.note(f"hook does not fit: no {getattr(owner, '__name__', owner)}.{missing[0]}")
    return not missing


# --- the place of a process ---------------------------------------------------------------------


class Layout:
    """The processes of an engine by its VllmConfig; the environment does not have them.

    world: workers of one engine, of ``engines``; ``engine`` is this one. Data-parallel engines of a
    model without experts are independent of each other: each is a replica.
    """

    def __init__(self, config: Any) -> None:
        parallel, names = config.parallel_config, config.model_config.served_model_name
        self.tensor = int(parallel.tensor_parallel_size)
        self.pipeline = int(parallel.pipeline_parallel_size)
        self.world = int(parallel.world_size)
        self.separate = parallel.distributed_executor_backend != "uni"
        self.engines = max(1, int(parallel.data_parallel_size))
        self.engine = int(getattr(parallel, "data_parallel_index", 0) or 0)
        replica = 0
        if self.engines == 1:
            replica, self.engine = self.engine, 0
        job = names if isinstance(names, str) else next(iter(names or ()), "")
        run = str(getattr(config, "instance_id", "") or "")
        self.about = {"job": job, "run": run, "engine": replica}


def worker_place(config: Any, rank: int, local_rank: int) -> dict[str, Any]:
    """Return the metadata of a worker. ``rank``: within its engine."""
    here = Layout(config)
    parallel = {
        "data": [here.engine, here.engines],
        "tensor": [rank % here.tensor, here.tensor],
        "pipeline": [rank // here.tensor % here.pipeline, here.pipeline],
    }
    return {
        **here.about,
        "rank": here.engine * here.world + rank,
        "local_rank": local_rank,
        "world_size": here.engines * here.world,
        "parallel": {kind: place for kind, place in parallel.items() if place[1] > 1},
    }


def other_place(config: Any, front_end: int | None = None) -> dict[str, Any]:
    """Return the metadata of a scheduler, or of a front end by its number."""
    here = Layout(config)
    rank = here.engines * here.world
    if front_end is None:
        rank += here.engine
    else:
        rank += front_end + (here.engines if here.separate else 0)
    return {**here.about, "rank": rank, "local_rank": rank, "world_size": rank + 1}


# --- work -----------------------------------------------------------------------------------------


def work_of(output: Any) -> tuple[int, int, int, int]:
    """Return prefill tokens, decoded requests, KV tokens and all tokens of a SchedulerOutput.

    Decoded are the requests with output tokens already. One that is computed again after a
    preemption counts as one of them, and its other tokens as those of a prompt.
    """
    cached, total = output.scheduled_cached_reqs, output.total_num_scheduled_tokens
    decodes = len(cached.num_output_tokens) - cached.num_output_tokens.count(0)
    drafts = output.scheduled_spec_decode_tokens
    decoded = decodes + (sum(map(len, drafts.values())) if drafts else 0)
    kv = sum(cached.num_computed_tokens) + total
    if output.scheduled_new_reqs:
        kv += sum(map(attrgetter("num_computed_tokens"), output.scheduled_new_reqs))
    return max(0, total - decoded), decodes, kv, total


# --- workers --------------------------------------------------------------------------------------


def _hook_worker(module: ModuleType) -> None:
    worker = module.Worker
    if not _fits(worker, "execute_model", "sample_tokens"):
        _report_misfit()
        return
    _wrap(worker, "__init__", after=_join_worker)
    _wrap(worker, "execute_model", before=_execute, phase="forward", after=_executed)
    _wrap(worker, "sample_tokens", phase="sample", after=_end)


def _wrap(owner: Any, name: str, **hooks: Any) -> None:
    """Wrap the method, unless it is wrapped already, as that of a base class."""
    original = getattr(owner, name)
    if not hasattr(original, "of_warpwatch"):
        wrapper: Any = wraps(original)(process.around(original, **hooks))
        wrapper.of_warpwatch = True
        setattr(owner, name, wrapper)


_work = (0, 0, 0, 0)


def _join_worker(made: None, worker: Any, *_: Any, **__: Any) -> None:
    process.join("rank", worker_place(worker.vllm_config, int(worker.rank), int(worker.local_rank)))


def _execute(worker: Any, scheduler_output: Any, *_: Any, **__: Any) -> bool:
    """Start a worker's iteration; return whether it computes anything."""
    global _work
    has_work = bool(scheduler_output.total_num_scheduled_tokens)
    if has_work and not process.leads and process.monitor is not None:
        _work = work_of(scheduler_output)
        process.begin(not scheduler_output.scheduled_cached_reqs.req_ids)
    return has_work


def _executed(output: Any, *_: Any, **__: Any) -> None:
    """End the iteration, unless ``sample_tokens`` follows."""
    if output is not None:
        _end()


def _end(*_: Any, **__: Any) -> None:
    if not process.leads and process.clock is not None and process.clock.open:
        prefill, decodes, kv, tokens = _work
        process.end(prefill, decodes, kv, tokens if process.counts_tokens else 0)


def _hook_cpu(module: ModuleType) -> None:
    """Time collectives on the CPU; on a GPU they are kernels, often of a graph."""
    communicator = module.CpuCommunicator
    for name in ("all_reduce", "gather", "all_gather", "reduce_scatter"):
        if hasattr(communicator, name):
            _wrap(communicator, name, phase="comm")


# --- the scheduler --------------------------------------------------------------------------------


def _hook_scheduler(module: ModuleType) -> None:
    """Wrap the class of the scheduler, maybe the user's own, once the engine gets it."""
    if _fits(module.SchedulerConfig, "get_scheduler_cls"):
        _wrap(module.SchedulerConfig, "get_scheduler_cls", after=_hook_scheduler_class)


def _hook_scheduler_class(kind: Any, *_: Any) -> None:
    if _fits(kind, "schedule", "update_from_output", "has_unfinished_requests"):
        _wrap(kind, "__init__", after=_join_scheduler)
        _wrap(kind, "schedule", before=_schedule, phase="schedule", after=_scheduled)
        _wrap(kind, "update_from_output", before=_update, after=_updated)


def _join_scheduler(made: None, scheduler: Any, *_: Any, **__: Any) -> None:
    process.join("scheduler", other_place(scheduler.vllm_config))
    process.lead()
    if process.counts is not None:
        process.counts.sample = partial(_sample, scheduler)


def _sample(scheduler: Any) -> tuple[int, int, float]:
    """Return requests running and waiting, and the use of the KV cache. In the helper thread."""
    running, waiting = scheduler.get_request_counts()
    return running, waiting, scheduler.get_kv_cache_usage()


def _schedule(scheduler: Any, *_: Any, **__: Any) -> None:
    clock = process.clock
    if clock is not None and not clock.open and scheduler.has_unfinished_requests():
        process.begin(False)


def _scheduled(output: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    counts = process.counts
    if counts is None:
        return
    if output.preempted_req_ids:
        counts.preemptions += len(output.preempted_req_ids)
    if output.scheduled_new_reqs:
        new = (scheduler.requests.get(one.req_id) for one in output.scheduled_new_reqs)
        counts.observe("queue", [_queued_s(one) for one in new if one])
    if process.is_separate:
        process.switch("wait")


def _queued_s(request: Any) -> float:
    """Return a request's time in the engine's queue; without statistics, since it arrived."""
    if request.events:
        return time.monotonic() - float(request.events[0].timestamp)
    return time.time() - float(request.arrival_time)


def _update(*_: Any, **__: Any) -> None:
    if process.is_separate:
        process.switch("other")


def _updated(
    result: Mapping[int, Any], scheduler: Any, scheduler_output: Any, *_: Any, **__: Any
) -> None:
    counts = process.counts
    if counts is None:
        return
    if scheduler_output.total_num_scheduled_tokens:
        prefill, decodes, kv, tokens = work_of(scheduler_output)
        process.end(prefill, decodes, kv, tokens)
        for outputs in result.values():
            made = outputs.outputs
            counts.generated_tokens += sum(map(len, map(_NEW_TOKENS, made)))
            if prefill:
                first = filter(None, map(_PREFILL_STATS, made))
                counts.prompt_tokens += sum(map(attrgetter("num_prompt_tokens"), first))
            # Absent without statistics, and of all but one client.
            stats = outputs.scheduler_stats
            if stats is not None and stats.prefix_cache_stats is not None:
                counts.prefix_hit_tokens += stats.prefix_cache_stats.hits
                counts.prefix_query_tokens += stats.prefix_cache_stats.queries
    if not scheduler.has_unfinished_requests():
        process.rest()


# --- the front end --------------------------------------------------------------------------------


def _hook_front_end(module: ModuleType, name: str) -> None:
    _wrap(getattr(module, name), "__init__", after=_join_front_end)


def _join_front_end(made: None, front_end: Any, *_: Any, client_index: int = 0, **__: Any) -> None:
    if not getattr(front_end, "log_stats", True):
        process.note(
            "no latencies and prefix hits: vLLM's statistics are off (--disable-log-stats)"
        )
    place = other_place(front_end.vllm_config, int(client_index or 0))
    process.join("frontend", place)


def _hook_loggers(module: ModuleType) -> None:
    """Read what all loggers get; a logger of our own would switch the statistics on."""
    if _fits(module.StatLoggerManager, "record"):
        _wrap(module.StatLoggerManager, "record", before=_observe)


def _observe(_: Any, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
    counts = process.counts
    if counts is not None and iteration_stats is not None:
        counts.observe("first_token", iteration_stats.time_to_first_tokens_iter)
        counts.observe("inter_token", iteration_stats.inter_token_latencies_iter)


def _hook_engines(module: ModuleType) -> None:
    """Report an orderly end of the server, which kills its engines before they can do so."""
    if _fits(module.CoreEngineProcManager, "shutdown"):
        _wrap(module.CoreEngineProcManager, "shutdown", before=_report_shutdown)


def _report_shutdown(manager: Any, *_: Any, **__: Any) -> None:
    # After the failure of an engine the server shuts down, too.
    if all(engine.exitcode in (None, 0) for engine in manager.processes):
        process.shut_down()


def _report_misfit() -> None:
    """Show the note of a worker that cannot be hooked by a process of the job."""
    process.join("frontend", {"rank": 0, "world_size": 1})


# The hooks by the module whose import they wait for.
_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "vllm.v1.worker.gpu_worker": _hook_worker,
    "vllm.distributed.device_communicators.cpu_communicator": _hook_cpu,
    "vllm.config.scheduler": _hook_scheduler,
    "vllm.v1.metrics.loggers": _hook_loggers,
    "vllm.v1.engine.utils": _hook_engines,
}
_FRONT_END_HOOKS: dict[str, Callable[[ModuleType], None]] = {
    "vllm.v1.engine.async_llm": partial(_hook_front_end, name="AsyncLLM"),
    "vllm.v1.engine.llm_engine": partial(_hook_front_end, name="LLMEngine"),
}
