"""Callbacks for training frameworks, which report where a step ends.

- lightning, transformers: a ``WarpwatchCallback`` for the trainer
- accelerate, deepspeed: ``watch()``, for loops of your own around their optimizer or engine

Each sets the step clock for its training; the first one wins. All use ``hooks.install()`` for the
phases that the framework does not report: data, backward, optimizer. Under ``warpwatch run``
hooks/frameworks.py does the same without code. DDP and FSDP need nothing. A module of this package
imports its framework.
"""
