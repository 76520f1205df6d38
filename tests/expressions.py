"""Golden files of Python expressions: what functions without effects return."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from pydantic import ValidationError

from tests.conftest import Cases
from warpwatch_capturing.alerts import Settled
from warpwatch_telemetry.errors import WarpwatchError


def check(cases: Cases, file: str, *modules: ModuleType, **more: object) -> None:
    """Compare the values of a file's expressions, which know the modules and all their classes."""
    known: dict[str, Any] = {}
    for module in modules:
        known |= {name: one for name, one in vars(module).items() if isinstance(one, type)}
        known[module.__name__.rpartition(".")[2]] = module

    def value(text: str) -> object:
        return _tried(lambda: repr(eval(text, known | {"play": play} | more)))

    cases(file, value)


def play(subject: object, *calls: tuple[Any, ...]) -> list[object]:
    """Return what methods of the subject return or raise, one after the other; or attributes."""
    found: list[object] = []
    for name, *arguments in calls:
        one = getattr(subject, name)
        found.append(_tried(partial(one, *arguments)) if callable(one) else one)
    return found


def _tried(work: Callable[[], object]) -> object:
    try:
        return work()
    except ValidationError as error:
        return "; ".join(one["msg"] for one in error.errors())
    except Settled as settled:
        return f"{settled.outcome}: {settled}"
    except (ValueError, WarpwatchError) as error:
        return f"{getattr(error, 'reason', type(error).__name__)}: {error}"
