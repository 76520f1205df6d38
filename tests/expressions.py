"""Golden files of Python expressions: what functions without effects return."""

from types import ModuleType
from typing import Any

from pydantic import ValidationError

from tests.conftest import Cases
from warpwatch_telemetry.errors import WarpwatchError


def check(cases: Cases, file: str, *modules: ModuleType, **more: object) -> None:
    """Compare the values of a file's expressions, which know the modules and all their classes."""
    known: dict[str, Any] = {}
    for module in modules:
        known |= {name: one for name, one in vars(module).items() if isinstance(one, type)}
        known[module.__name__.rpartition(".")[2]] = module

    def value(text: str) -> object:
        try:
            return repr(eval(text, known | more))
        except ValidationError as error:
            return "; ".join(one["msg"] for one in error.errors())
        except (ValueError, WarpwatchError) as error:
            return f"{type(error).__name__}: {error}"

    cases(file, value)
