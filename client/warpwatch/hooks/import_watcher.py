"""Calls back when a module has been imported."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from warpwatch import faults


class ImportWatcher:
    """A finder that finds nothing itself: it calls back when a module has been imported."""

    def __init__(self) -> None:
        self._wanted: dict[str, list[Callable[[ModuleType], None]]] = {}
        # Another watcher, also of another library, asks all finders as well, this one included.
        self._searched: set[str] = set()

    def want(self, module: str, callback: Callable[[ModuleType], None]) -> None:
        self._wanted.setdefault(module, []).append(callback)

    def install(self) -> None:
        for name in list(self._wanted):
            module = sys.modules.get(name)
            if module is not None:
                self._found(name, module)
        if self._wanted:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        if name not in self._wanted or name in self._searched:
            return None
        self._searched.add(name)
        try:
            spec = self._search(name, path, target)
        finally:
            self._searched.discard(name)
        if spec is not None:
            try:
                self._watch(name, spec.loader)
            except Exception as error:
                # A loader that cannot be watched: imported as ever, only not hooked.
                faults.swallow(error)
        return spec

    def _search(self, *asked: Any) -> Any:
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(*asked)
            if spec is not None:
                return spec
        return None

    def _watch(self, name: str, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            original(module)
            self._found(name, module)

        loader.exec_module = exec_module

    def _found(self, name: str, module: ModuleType) -> None:
        for callback in self._wanted.pop(name, ()):
            try:
                callback(module)
            except Exception as error:
                faults.swallow(error)
        if not self._wanted and self in sys.meta_path:
            sys.meta_path.remove(self)
