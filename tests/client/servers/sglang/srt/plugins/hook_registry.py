"""The registry of hooks with what ours need of it, as in SGLang 0.5.23."""

import functools
import pkgutil
from collections.abc import Callable
from enum import Enum
from typing import Any


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    _hooks: dict[str, Callable[..., Any]] = {}  # noqa: RUF012 (as in SGLang)

    @classmethod
    def register(cls, target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        cls._hooks[target] = hook

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook in cls._hooks.items():
            path, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(path)
            setattr(owner, name, cls._around(getattr(owner, name), hook))

    @staticmethod
    def _around(original: Callable[..., Any], hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        return call
