"""Golden files of Python expressions: what functions without effects return."""

import importlib
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
from pydantic import ValidationError

from tests.conftest import Cases
from warpwatch_capturing.alerts import Settled
from warpwatch_runtime.http_requests import RequestError
from warpwatch_telemetry.errors import WarpwatchError


def check(cases: Cases, file: str, modules: Mapping[str, str], more: Mapping[str, object]) -> None:
    """Compare the values of a file's expressions.

    They know ``modules``, the names of each package's, with all their classes, and ``more``.
    """
    known: dict[str, Any] = {}
    for package, names in modules.items():
        for name in names.split():
            module = known[name] = importlib.import_module(f"{package}.{name}".strip("."))
            known |= {name: one for name, one in vars(module).items() if isinstance(one, type)}

    def value(text: str) -> object:
        return _tried(lambda: repr(eval(text, {**known, "play": play, **more})))

    with pytest.MonkeyPatch.context() as patch:
        # Local time is seven hours ahead.
        patch.setenv("TZ", "WWT-7")
        time.tzset()
        cases(file, value)
    time.tzset()


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
    except (OSError, ValueError, RequestError, WarpwatchError) as error:
        return f"{getattr(error, 'reason', type(error).__name__)}: {error}"
