"""Steps of known length on the GPU, timed by CUDA events of the program's own beside the shim's.

    python -m benchmarks.gpu.timed_steps STEPS

Prints, by step number, the seconds between the ends of two steps and from a step's begin to its
end: what the shim must report as ``duration_s`` and ``gpu_s``.
"""

from __future__ import annotations

import json
import sys
import time

import torch

import warpwatch
from benchmarks.gpu.step_loops import Training, attach, shim_loop

# Every so many steps the CPU dawdles: then the GPU idles within the step.
_SLOW_EVERY, _SLOW_S = 10, 0.02


def main(steps: str) -> None:
    training = Training("large", "cuda")
    monitor = warpwatch.attach(job="timed-steps")
    attach(shim_loop(training, monitor), monitor, cuda=True)
    torch.cuda.synchronize()
    events = []
    first = monitor.clock.steps
    for number in range(int(steps)):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with monitor.step(samples=1):
            begin.record()
            if number % _SLOW_EVERY == 0:
                time.sleep(_SLOW_S)
            training.backward(training.forward())
            end.record()
        events.append((begin, end))
    # The shim reads a step back at a later one.
    shim_loop(training, monitor)(2)
    torch.cuda.synchronize()
    shim_loop(training, monitor)(2)
    truth = {
        first + i: {
            "duration_s": events[i - 1][1].elapsed_time(events[i][1]) / 1e3,
            "gpu_s": events[i][0].elapsed_time(events[i][1]) / 1e3,
        }
        for i in range(1, len(events))
    }
    # Time for the daemon to read the ring.
    time.sleep(2)
    print(json.dumps(truth))


if __name__ == "__main__":
    main(*sys.argv[1:])
