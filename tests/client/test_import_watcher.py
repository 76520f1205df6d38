"""Callbacks at imports, next to others who watch imports in the same way."""

import importlib
import sys
from types import ModuleType

from warpwatch.hooks.import_watcher import ImportWatcher


def test_two_watchers_of_one_module_both_see_its_import(tmp_path, monkeypatch):
    (tmp_path / "imported_by_two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[ModuleType] = []
    for _ in range(2):
        watcher = ImportWatcher()
        watcher.want("imported_by_two", seen.append)
        watcher.install()
    module = importlib.import_module("imported_by_two")
    sys.modules.pop("imported_by_two")
    assert seen == [module, module]
    assert not any(isinstance(finder, ImportWatcher) for finder in sys.meta_path)
