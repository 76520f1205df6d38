"""Callbacks at imports, next to others who watch imports in the same way."""

import importlib
import sys
from functools import partial
from types import ModuleType

from warpwatch.hooks.import_watcher import ImportWatcher


def test_two_watchers_of_one_module_both_see_its_import(tmp_path, monkeypatch):
    (tmp_path / "imported_by_two.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[str] = []

    def note(name: str, module: ModuleType) -> None:
        seen.append(name)

    for name in ("first", "second"):
        watcher = ImportWatcher()
        watcher.want("imported_by_two", partial(note, name))
        watcher.install()
    importlib.import_module("imported_by_two")
    sys.modules.pop("imported_by_two")
    assert sorted(seen) == ["first", "second"]
    assert not any(isinstance(finder, ImportWatcher) for finder in sys.meta_path)
