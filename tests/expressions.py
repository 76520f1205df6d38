"""Golden files of Python expressions: what functions and small classes return."""

import importlib
import io
import itertools
import os
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, chdir, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from pydantic import ValidationError

from tests.conftest import Cases
from warpwatch_capturing.alerts import Settled
from warpwatch_diagnosis.trace.files import TraceError
from warpwatch_runtime.http_requests import RequestError
from warpwatch_serving.answers import HttpError
from warpwatch_telemetry.errors import WarpwatchError


def check(cases: Cases, name: str, modules: Mapping[str, str], more: Mapping[str, object]) -> None:
    """Compare the values of a golden file's expressions.

    They know ``modules``, the names of each package's, with all their classes, and ``more``.
    """
    numbers = itertools.count()

    def file(content: bytes | str) -> Path:
        path = Path(f"file{next(numbers)}")
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    known: dict[str, Any] = {"Fake": SimpleNamespace, "Path": Path, "os": os, "replace": replace}
    for package, names in modules.items():
        for one in names.split():
            module = known[one] = importlib.import_module(f"{package}.{one}".strip("."))
            known |= {key: kind for key, kind in vars(module).items() if isinstance(kind, type)}
    known |= {"file": file, "partial": partial, "play": play, "printed": printed, **more}
    with ExitStack() as stack:
        # Local time is seven hours ahead.
        stack.callback(time.tzset)
        stack.enter_context(patch.dict(os.environ, TZ="WWT-7"))
        time.tzset()
        stack.enter_context(chdir(stack.enter_context(TemporaryDirectory())))
        cases(name, lambda text: tried(lambda: repr(eval(text, dict(known)))))


def play(subject: object, *calls: tuple[Any, ...]) -> list[object]:
    """Return what methods of the subject return or raise, one after the other; or attributes."""
    found: list[object] = []
    for name, *arguments in calls:
        one = getattr(subject, name)
        found.append(tried(partial(one, *arguments)) if callable(one) else one)
    return found


def printed(subject: object, *calls: tuple[Any, ...]) -> object:
    """Return as ``play``, and what was written to both streams."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
        return play(subject, *calls), out.getvalue(), err.getvalue()


def tried(work: Callable[[], object]) -> object:
    try:
        return work()
    except ValidationError as error:
        return "; ".join(one["msg"] for one in error.errors())
    except Settled as settled:
        return f"{settled.outcome}: {settled}"
    except HttpError as error:
        return f"{error.status} {error.reason}: {error.detail} {error.headers}"
    except (OSError, ValueError, RequestError, TraceError, WarpwatchError) as error:
        return f"{getattr(error, 'reason', type(error).__name__)}: {error}"
