"""Our frames are none for dynamo to compile, and what it takes off optimizers is put back.

A function that torch.compile breaks out of runs its callees under dynamo; a hook among them would
be compiled for nothing. Calls that dynamo traces itself (optimizer hooks) ask ``is_compiling``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from types import CodeType, FunctionType, ModuleType
from typing import Any

from warpwatch.hooks.hook_state import HookState
from warpwatch.hooks.optimizer import OptimizerHooks, hooks_of

MODULE = "torch._dynamo.eval_frame"
_OURS = "warpwatch."


def install(module: ModuleType, state: HookState) -> None:
    for name, ours in list(sys.modules.items()):
        if name.startswith(_OURS):
            for code in codes(ours):
                module.skip_code(code)
    optimizers = getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", None)
    patcher = module.TorchPatcher
    original = patcher.patch
    hooks = hooks_of(state)

    @wraps(original)
    def patch() -> None:
        original()
        if optimizers is not None:
            restore(optimizers, hooks)

    patcher.patch = staticmethod(patch)


def codes(module: ModuleType) -> Iterator[CodeType]:
    """The code of all functions of the module, those inside of others included."""
    spaces: list[Mapping[str, Any]] = [vars(module)]
    spaces += [vars(value) for value in vars(module).values() if isinstance(value, type)]
    waiting: list[Any] = []
    for space in spaces:
        functions = (value for value in space.values() if isinstance(value, FunctionType))
        waiting += [function.__code__ for function in functions]
    while waiting:
        code = waiting.pop()
        if code.co_filename == module.__file__:
            yield code
            waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def restore(optimizers: Any, hooks: OptimizerHooks) -> None:
    """Before PyTorch 2.9 the first torch.compile takes the hooks off the optimizers there are."""
    wrapper = optimizers.profile_hook_step(restore).__code__
    classes = [optimizers]
    while classes:
        found = classes.pop()
        classes += found.__subclasses__()
        step = vars(found).get("step")
        stripped = getattr(step, "hooked", False) and step.__code__ is not wrapper
        if stripped and not _hooked_inside(step, wrapper):
            found.step = _stepping(step, hooks)


def _hooked_inside(step: Any, wrapper: CodeType) -> bool:
    """torch.compile may have put its own around the hooked one."""
    while step is not None:
        if getattr(step, "__code__", None) is wrapper:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def _stepping(original: Callable[..., Any], hooks: OptimizerHooks) -> Callable[..., Any]:
    @wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.before(args[0], args, kwargs) or (args, kwargs)
        done = original(*args, **kwargs)
        hooks.after(args[0], args, kwargs)
        return done

    return step
