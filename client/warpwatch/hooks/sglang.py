"""Hooks of SGLang, which finds them by its entry points ``sglang.srt.plugins``.

Each scheduler of SGLang computes: it is a rank. An iteration lasts from one
``process_batch_result`` to the next, or after idle from its own ``run_batch``. This also holds with
overlapping, where the next batch is launched before the results of one are processed. Written from
the source of 0.5.23; no server was run with it.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable
from importlib import import_module
from typing import Any

from warpwatch import faults
from warpwatch.hooks.serving import ServerProcess

NAME = "warpwatch"
# Set by the first process of a server for all others.
REPLICA = "WARPWATCH_REPLICA"
_SCHEDULER = "sglang.srt.managers.scheduler"
_FRONT_END = "sglang.srt.managers.tokenizer_manager"
# Its collectors exist only with --enable-metrics.
_METRICS = "sglang.srt.observability.metrics_collector"

process = ServerProcess()
# The work of the batches whose results are not processed yet, as of ``work_of``.
_works: deque[tuple[int, int, int, int]] = deque(maxlen=64)


def install() -> None:
    """Register the hooks; SGLang's plug-in function, called early in every process."""
    if not process.starts("sglang"):
        return
    try:
        process.identify("sglang")
        found = import_module("sglang.srt.plugins.hook_registry")
        register, around = found.HookRegistry.register, found.HookType.AROUND
        for target, hook in _HOOKS.items():
            register(target, hook, around)
    except Exception as error:
        faults.swallow(error)
        _report(f"hook does not fit: {type(error).__name__}: {error}")


def watch_plugins() -> None:
    """Report it in the status if ``SGLANG_PLUGINS`` leaves these hooks out."""
    allowed = os.environ.get("SGLANG_PLUGINS")
    names = [name.strip() for name in (allowed or NAME).split(",")]
    if NAME not in names:
        process.identify("sglang")
        _report(f"SGLANG_PLUGINS leaves {NAME} out: add it to see iterations")


def _report(note: str) -> None:
    """Show the note by the first process of the server."""
    process.note(note)
    if REPLICA not in os.environ:
        process.join("frontend", {"rank": 0, "world_size": 1, **_replica()})


def _replica() -> dict[str, Any]:
    return {"run": os.environ.setdefault(REPLICA, str(time.time_ns()))}


# --- the place of a process -----------------------------------------------------------------------


def _place(arguments: Any, parallel: Any) -> dict[str, Any]:
    """Return the metadata of a scheduler. With attention in data parallel, ranks are tensor's.

    Otherwise data-parallel engines are independent of each other: each is a replica.
    """
    tensor, pipeline = int(arguments.tp_size), int(arguments.pp_size)
    here = int(getattr(parallel, "tp_rank", 0) or 0), int(getattr(parallel, "pp_rank", 0) or 0)
    engine = 0 if arguments.enable_dp_attention else int(getattr(parallel, "dp_rank", 0) or 0)
    places = {"tensor": (here[0], tensor), "pipeline": (here[1], pipeline)}
    return {
        **_replica(),
        "engine": engine,
        "job": arguments.served_model_name,
        "rank": here[1] * tensor + here[0],
        "world_size": pipeline * tensor,
        "parallel": {kind: [*place] for kind, place in places.items() if place[1] > 1},
    }


def _join(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    parallel = getattr(sys.modules.get(_SCHEDULER), "get_parallel", lambda: None)()
    process.join("rank", _place(scheduler.server_args, parallel))
    process.lead()


def _join_front_end(result: Any, front_end: Any, *_: Any, **__: Any) -> None:
    if not getattr(front_end.server_args, "enable_metrics", False):
        process.note("no latencies and KV cache: SGLang's metrics are off (--enable-metrics)")
    place = _place(front_end.server_args, None)
    rank = place["world_size"]
    place |= {"rank": rank, "world_size": rank + 1, "parallel": {}}
    process.join("frontend", place)


# --- iterations -----------------------------------------------------------------------------------


def _launch(_: Any, batch: Any, *__: Any, **___: Any) -> None:
    _works.append(work_of(batch))
    if _works[-1][3]:
        process.begin(False)


def work_of(batch: Any) -> tuple[int, int, int, int]:
    """Return prefill tokens, decoded requests, KV tokens and all tokens of a ScheduleBatch."""
    mode, kv = batch.forward_mode, int(batch.seq_lens_sum or 0)
    if mode.is_decode():
        decodes = len(batch.reqs)
        return 0, decodes, kv, decodes
    if not mode.is_extend():
        return 0, 0, 0, 0
    tokens, decodes = int(batch.extend_num_tokens or 0), len(batch.decoding_reqs or ())
    return max(0, tokens - decodes), decodes, kv, tokens


def _processed(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    prefill, decodes, kv, tokens = _works.popleft() if _works else (0, 0, 0, 0)
    counts = process.counts
    if counts is None or not tokens:
        return
    process.end(prefill, decodes, kv, tokens if process.counts_tokens else 0)
    if process.counts_tokens:
        counts.prompt_tokens += prefill
        counts.generated_tokens += decodes
        counts.running = len(scheduler.running_batch.reqs)
        counts.waiting = len(scheduler.waiting_queue)


def _rest(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:
    if scheduler.is_fully_idle():
        _works.clear()
        process.rest()


# --- what SGLang measures ------------------------------------------------------------------------


def _first_token(_: Any, labels: Any, value: float, *__: Any, **___: Any) -> None:
    _observe("first_token", value, 1)


def _inter_token(_: Any, labels: Any, internval: float, num_new_tokens: int) -> None:
    _observe("inter_token", internval, num_new_tokens)


def _observe(latency: str, seconds: float, tokens: int) -> None:
    if process.counts is not None and tokens > 0:
        process.counts.observe(latency, [seconds / tokens] * tokens)


def _log_stats(_: Any, stats: Any, *__: Any) -> None:
    if process.counts is not None:
        process.counts.kv_usage = getattr(stats, "token_usage", None)


def _around(**hooks: Any) -> Callable[..., Any]:
    """Return a hook for SGLang's registry, which gives it the method and its arguments."""
    return lambda original, *args, **kwargs: process.around(original, **hooks)(*args, **kwargs)


_HOOKS: dict[str, Callable[..., Any]] = {
    f"{_SCHEDULER}.Scheduler.__init__": _around(after=_join),
    f"{_SCHEDULER}.Scheduler.get_next_batch_to_run": _around(phase="schedule"),
    f"{_SCHEDULER}.Scheduler.run_batch": _around(before=_launch, phase="forward"),
    f"{_SCHEDULER}.Scheduler.process_batch_result": _around(phase="sample", after=_processed),
    f"{_SCHEDULER}.Scheduler.on_idle": _around(after=_rest),
    f"{_FRONT_END}.TokenizerManager.__init__": _around(after=_join_front_end),
    f"{_METRICS}.TokenizerMetricsCollector.observe_time_to_first_token": _around(
        before=_first_token
    ),
    f"{_METRICS}.TokenizerMetricsCollector.observe_inter_token_latency": _around(
        before=_inter_token
    ),
    f"{_METRICS}.SchedulerMetricsCollector.log_stats": _around(before=_log_stats),
}
