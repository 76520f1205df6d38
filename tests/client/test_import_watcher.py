"""Callbacks at imports, next to others who watch imports in the same way."""

import importlib
import sys
from types import ModuleType

from warpwatch import faults
from warpwatch.hooks.import_watcher import ImportWatcher


def test_two_watchers_of_one_module_both_see_its_import(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[ModuleType] = []

    def fail(module: ModuleType) -> None:
        raise ZeroDivisionError(module.done)

    (tmp_path / "imported_by_two.py").write_text("done = True")
    for _ in range(2):
        watcher = ImportWatcher()
        for callback in (fail, seen.append):
            watcher.want("imported_by_two", callback)
        watcher.install()
    # It is found again after an import that failed.
    assert all(watcher.find_spec("imported_by_two") for _ in range(2))
    before = faults.count()
    module = importlib.import_module("imported_by_two")
    assert faults.count() == before + 2
    # One that is there already is found at once, and its loader is as before.
    watcher.want("imported_by_two", seen.append)
    watcher.install()
    importlib.reload(module)
    sys.modules.pop("imported_by_two")
    assert seen == [module] * 3
    assert not any(isinstance(finder, ImportWatcher) for finder in sys.meta_path)
