"""Calls for golden expressions: with a changed module, and with what they raise."""

from collections.abc import Callable
from typing import Any

import pytest


def raised(work: Callable[..., object], *arguments: object) -> object:
    """Return the result, or the error with its class."""
    try:
        return work(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def limits(module: Any) -> dict[str, object]:
    """Return the module's own numbers and names: its intervals, limits and labels."""
    own = sorted(vars(module).items())
    return {name: of for name, of in own if name.isupper() and isinstance(of, float | int | str)}


def answered(work: Callable[..., object], *arguments: object, of: Any, **answers: Any) -> object:
    """Return the result while a module's functions have these answers: values, or functions."""
    with pytest.MonkeyPatch.context() as patch:
        for name, answer in answers.items():
            call = answer if callable(answer) else lambda *_, answer=answer: answer
            patch.setattr(of, name, call)
        return raised(work, *arguments)
