"""Stand-ins for process groups, optimizers and DDP, and what the shim finds out about them."""

import gc
import sys
from functools import partial
from threading import get_ident
from types import SimpleNamespace
from typing import Any

import pytest

from tests.manual_clock import ManualClock
from warpwatch import model, monitor, steps
from warpwatch.hooks.backward import LastGradient
from warpwatch.hooks.dataloader import LoaderHook
from warpwatch.hooks.hook_state import ClockChoice, HookState
from warpwatch.hooks.modules import EvalHook, ModuleHook
from warpwatch.hooks.optimizer import OptimizerHooks
from warpwatch.monitor import Monitor
from warpwatch.ring import DURATION, FIRST_PHASE, SAMPLES, TOKENS
from warpwatch.steps import StepClock


class Group:
    """A process group as torch describes it; ``rank`` raises in a process outside of it."""

    def __init__(self, group_desc: str, rank: int | None = None, size: int = 2) -> None:
        self.group_desc, self._rank, self.size = group_desc, rank, lambda: size

    def rank(self) -> int:
        if self._rank is None:
            raise ValueError("not in the group")
        return self._rank


def mesh(dimension: str, rank: int | None, size: int) -> Any:
    """Return a DeviceMesh of one dimension; without ``rank`` the process is outside of it."""
    here = None if rank is None else [rank]
    return SimpleNamespace(mesh_dim_names=(dimension,), shape=(size,), get_coordinate=lambda: here)


def getters(**places: tuple[int, int]) -> Any:
    """``get_<name>_parallel_rank`` and ``get_<name>_parallel_world_size`` by name."""
    module: Any = SimpleNamespace(mpu=None)
    for name, (rank, size) in places.items():
        setattr(module, f"get_{name}_parallel_rank", lambda rank=rank: rank)
        setattr(module, f"get_{name}_parallel_world_size", lambda size=size: size)
    return module


def places(*lookups: tuple[float, list[Group], dict[str, Any]], meshes: Any = ()) -> list[Any]:
    """Return the places at each lookup: its time, the groups and modules there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "_known", (0, 0.0, {}))
        patch.setattr(model, "_noted", {})
        for one in meshes:
            model.note_mesh(one)
        found: list[Any] = []
        for now, groups, modules in lookups:
            c10d = SimpleNamespace(_world=SimpleNamespace(pg_names=dict.fromkeys(groups, "0")))
            patch.setitem(sys.modules, "torch.distributed.distributed_c10d", c10d)
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            found.append(model.places(now))
        return found


def weight(*shape: int, dtype: str = "float32", trains: bool = True, **more: Any) -> Any:
    return SimpleNamespace(shape=shape, dtype=f"torch.{dtype}", requires_grad=trains, **more)


class Optimizer:
    def __init__(self, *weights: Any) -> None:
        self.param_groups = [{"params": weights}]


def parameters(*optimizers: Any, library: str = "none", drop: int = -1) -> list[Any]:
    """Return the metadata after each optimizer; number ``drop`` is deleted after its step."""
    kept, known, said = list(optimizers), model.Parameters(), list[Any]()
    del optimizers
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, library, None)
        noted: dict[str, Any] = {}
        patch.setattr(model, "_noted", noted)
        for number in range(len(kept)):
            said.append(known.add(kept[number]))
            assert known.know(kept[number])
            if number == drop:
                kept[number] = None
                gc.collect()
    return [*said, noted] if noted else said


def turns(letters: str, slow_from: int = 1000) -> str:
    """Let optimizers step, one a letter; return those whose step was one of the training.

    From the step ``slow_from`` on each takes longer than the time after which few are waited for.
    """
    clock: Any = SimpleNamespace(steps=0, begun_ns=1 << 62)
    choice, steppers, current, counted = ClockChoice(), dict[str, Optimizer](), "", ""
    for number, letter in enumerate(letters):
        stepper = steppers.setdefault(letter, Optimizer())
        clock.begun_ns = 0 if number >= slow_from else clock.begun_ns
        took = letter != current and choice.takes_over(stepper, steppers.get(current), clock)
        current = letter if took else current
        counts = letter == current and not (took and choice.gives_back)
        clock.steps += counts
        counted += letter if counts else "."
    return counted


class Parameter:
    """A parameter with hooks, which a backward calls once it has its gradient."""

    def __init__(self, trains: bool = True) -> None:
        self.requires_grad, self.hooks = trains, dict[object, Any]()

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        key = object()
        self.hooks[key] = hook
        return SimpleNamespace(remove=lambda: self.hooks.pop(key))

    register_hook = register_post_accumulate_grad_hook


def gradients(backwards: str, frozen: str = "", ignored: str = "") -> list[str]:
    """Return the boundaries of each backward of DDP: a letter is the gradient that comes last.

    Upper case: its gradients are not reduced. A dash: none with a hook comes. The parameters that
    have a hook go before.
    """
    state, boundaries = HookState(), list[int]()
    clock = SimpleNamespace(replace_innermost=boundaries.append)
    watched: Any = SimpleNamespace(clock=clock, phase=lambda name: SimpleNamespace(index=name))
    state.monitor, state.in_backward = watched, True
    last, known = LastGradient(state), {name: Parameter(name not in frozen) for name in "abc"}
    module = SimpleNamespace(named_parameters=lambda: list(known.items()))
    wrapped, said = SimpleNamespace(module=module, parameters_to_ignore=ignored), []
    for letter in backwards:
        last.prepare(wrapped, not letter.isupper())
        said.append("".join(name for name, one in known.items() if one.hooks))
        for one in sorted(known, key=lambda name: name == letter.lower()):
            if letter == "-":
                break
            for hook in list(known[one].hooks.values()):
                hook(None)
        said[-1] += f" {boundaries[0]}" if boundaries else ""
        boundaries.clear()
    return said


def stepped(story: str) -> list[Any]:
    """Return what a monitor has counted in a story, and what its calls returned.

    ``step`` has samples and tokens, ``end`` and ``fail`` leave the innermost step or phase,
    ``advance`` is in ms; other acts are methods of the monitor or of its clock.
    """
    passing, opened, said = ManualClock(), list[Any](), list[Any]()
    watched = Monitor(StepClock())
    with pytest.MonkeyPatch.context() as patch:
        for module in (monitor, steps):
            patch.setattr(module, "monotonic_ns", lambda: round(passing.monotonic() * 1e9))
        for act in story.split("; "):
            name, *given = act.split()
            numbers: list[Any] = [int(one) for one in given if one.lstrip("-").isdigit()]
            if name == "advance":
                passing.advance(numbers[0] / 1000)
            elif name == "begin":
                opened.append(watched.clock.begin())
            elif name in ("step", "phase"):
                opened.append(getattr(watched, name)(*(numbers or given)))
                opened[-1].__enter__()
            elif name in ("end", "fail"):
                error = ValueError() if name == "fail" else None
                opened.pop().__exit__(type(error), error, None)
            else:
                owner = watched if hasattr(watched, name) else watched.clock
                said.append(getattr(owner, name)(*(numbers or given)))
        clock, totals = watched.clock, watched.clock.totals
    phases_ms = [round(ns / 1e6) for ns in totals[FIRST_PHASE:]]
    spent = {
        "step": round(totals[DURATION] / 1e6),
        **dict(zip(clock.phase_names, phases_ms, strict=False)),
    }
    counted = [watched.step_clock, clock.steps, totals[SAMPLES], totals[TOKENS]]
    return [*(one for one in said if isinstance(one, bool)), *counted, spent]


def called(story: str) -> list[str]:
    """Return the phases that calls of a model start, and its backwards.

    ``f`` is a call with gradients; ``t`` and ``e`` are calls without, in training and in evaluation
    mode; ``b`` is a backward. ``d`` loads a batch, ``s`` ends a step, ``v`` is ``Module.eval``.
    """
    state, said = HookState(), list[str]()
    clock = SimpleNamespace(thread=get_ident(), steps=0)
    watched: Any = SimpleNamespace(clock=clock, switch=said.append)
    state.monitor, hook, evaluated = watched, ModuleHook(None, state), EvalHook(state)
    for act in story:
        if act == "b":
            state.backwards, state.samples = state.backwards + 1, 0
            said.append("backward")
        elif act == "d":
            state.batches, state.samples = state.batches + 1, 4
        elif act == "s":
            clock.steps += 1
        elif act == "v":
            evaluated.called()
        else:
            state.is_grad_enabled = partial(bool, act == "f")
            hook.begin(SimpleNamespace(training=act != "e"), ())
    return said


class Loader:
    """An iterator of a DataLoader."""

    _index_sampler = type("Sampler", (), {"batch_size": 4})()


def loaded(story: str) -> list[Any]:
    """Return the purpose of each batch (see dataloader.py), and what is counted.

    A capital is a batch of that loader, ``!`` finds the last one at its end, ``~`` deletes all.
    ``m`` makes the process a rank, ``n`` and ``g`` are without and with gradients, ``b`` is a
    backward and ``u`` an update.
    """
    state, purposes, used, loaders = HookState(), "", 0, dict[str, Loader]()
    hook = LoaderHook(state)
    for act in story:
        if act == "b":
            used += state.samples
            state.backwards, state.samples = state.backwards + 1, 0
        elif act == "u":
            state.updates += 1
        elif act == "m":
            state.monitor = Monitor(StepClock())
            state.monitor.clock.adopt()
        elif act in "ng":
            state.is_grad_enabled = partial(bool, act == "g")
        elif act == "~":
            loaders.clear()
        elif act == "!":
            hook.failed(hook.before(hook._iterator()))
        else:
            purposes += str(hook.before(loaders.setdefault(act, Loader())))
            hook.after(int(purposes[-1]), [SimpleNamespace(shape=(4, 8))])
    watched = state.monitor or Monitor(StepClock())
    clock = [watched.step_clock, watched.clock.steps]
    return [purposes, used, state.samples, state.batches, *clock]


def zeroed(story: str) -> list[Any]:
    """Return what is counted if ``A`` and ``B`` drop the gradients of ``b``; ``u`` is an update."""
    state, watched, steppers = HookState(), Monitor(StepClock()), {one: Optimizer() for one in "AB"}
    state.monitor, hooks = watched, OptimizerHooks(state)
    watched.clock.adopt()
    for act in story:
        state.backwards += act == "b"
        state.updates += act == "u"
        if act in steppers:
            hooks.zero_grad(steppers[act])
    return [watched.step_clock, watched.clock.steps, list(watched.phases), state.after_backward]
