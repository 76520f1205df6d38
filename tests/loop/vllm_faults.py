"""A plug-in of vLLM for tests: forward passes of a known length, and faults by a file.

A tiny model on a shared processor varies by far more than 15 %. So each forward pass also has an
operator that waits as long as the kernels of a larger model would take, with the processor idle:
what a test makes longer is this wait. The file has one JSON object:

forward_s: the wait of each tensor-parallel rank
schedule_s: how long the scheduler's process is busy before each of its plans
front_end_s: how long the event loop of the front end is blocked, again and again
"""

import asyncio
import json
import os
import time
from functools import wraps
from typing import Any

from warpwatch.hooks.import_watcher import ImportWatcher

FILE = "VLLM_FAULTS"
PAUSE_S = 0.02


def install() -> None:
    """Wrap the classes of vLLM once they are imported; the plug-in's function."""
    watcher = ImportWatcher()
    watcher.want("vllm.v1.worker.gpu_worker", delay_forward)
    watcher.want("vllm.v1.core.sched.scheduler", delay_schedule)
    watcher.want("vllm.v1.engine.async_llm", block_event_loop)
    watcher.install()


def now() -> Any:
    with open(os.environ[FILE]) as file:
        return json.load(file)


def delay_forward(module: Any) -> None:
    import torch

    torch.library.define("vllm_faults::kernels", "(Tensor like, float seconds) -> ()")
    torch.library.impl("vllm_faults::kernels", "CPU", lambda _, seconds: time.sleep(seconds))
    like, load = torch.zeros(1), module.Worker.load_model

    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        execute = self.model_runner.execute_model

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            if scheduler_output.total_num_scheduled_tokens:
                torch.ops.vllm_faults.kernels(like, now()["forward_s"][self.rank])
            return execute(scheduler_output, *args, **kwargs)

        self.model_runner.execute_model = execute_model
        return result

    module.Worker.load_model = load_model


def delay_schedule(module: Any) -> None:
    original = module.Scheduler.schedule

    @wraps(original)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        look_for_the_best_plan(now().get("schedule_s", 0.0))
        return original(self, *args, **kwargs)

    module.Scheduler.schedule = schedule


def look_for_the_best_plan(seconds: float) -> None:
    if seconds:
        time.sleep(seconds)


def block_event_loop(module: Any) -> None:
    original = module.AsyncLLM._run_output_handler

    @wraps(original)
    def run(self: Any) -> None:
        original(self)
        if not hasattr(self, "blocking"):
            self.blocking = asyncio.get_running_loop().create_task(write_access_logs())

    module.AsyncLLM._run_output_handler = run


async def write_access_logs() -> None:
    while True:
        await asyncio.sleep(PAUSE_S)
        if seconds := now().get("front_end_s"):
            time.sleep(seconds)
