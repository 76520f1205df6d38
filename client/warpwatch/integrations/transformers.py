"""Hugging Face: ``Trainer(callbacks=[WarpwatchCallback()])``."""

from __future__ import annotations

import importlib
from typing import Any

from warpwatch import hooks
from warpwatch.faults import guarded

SOURCE = "transformers"


def _callback_class() -> Any:
    return importlib.import_module("transformers.trainer_callback").TrainerCallback


class WarpwatchCallback(_callback_class()):  # type: ignore[misc]
    """Optimizer steps of ``Trainer.train``, with the tokens that the Trainer counts, if it does.

    It holds nothing of this process: it may be copied and pickled.
    """

    _tokens_seen = 0

    def __init__(self) -> None:
        super().__init__()
        hooks.install()

    @guarded
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tokens_seen = getattr(state, "num_input_tokens_seen", 0)
        hooks.install().begin_training(SOURCE)

    @guarded
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hooks.install().switch("forward")

    # The Trainer fetches all batches of a step before the first, so the next is ready.
    on_substep_end = on_step_begin

    @guarded
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hook_state = hooks.install()
        tokens_seen = getattr(state, "num_input_tokens_seen", 0)
        if tokens_seen > self._tokens_seen:
            # The Trainer counts all ranks together.
            hook_state.set_tokens(
                SOURCE, (tokens_seen - self._tokens_seen) // max(args.world_size, 1)
            )
            self._tokens_seen = tokens_seen
        hook_state.end_step(SOURCE)

    @guarded
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        hooks.install().end_training(SOURCE)
