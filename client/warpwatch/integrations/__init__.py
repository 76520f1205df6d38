"""Training frameworks: who runs the loop says where a step ends.

- lightning, transformers: a ``WarpwatchCallback`` for the trainer
- accelerate, deepspeed: ``watch()``, for loops of your own around their optimizer or engine

Each claims the step clock for its training, the first of them wins, and all of them use the hooks
(``hooks.install()``) for what the framework does not report: data, backward, optimizer. Under
``warpwatch run`` hooks/frameworks.py does the same without code. DDP and FSDP need nothing.
Import a module of this package only beside its framework: it imports that.
"""
