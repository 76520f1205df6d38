"""Runs at the start of every Python program under ``warpwatch run``, before the program itself.

Installs the hooks, then runs the sitecustomize that this file hides, if there is one.
"""
# ruff: noqa: INP001 (a folder on PYTHONPATH, no package)

import importlib
import os
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec

_HERE = os.path.dirname(os.path.abspath(__file__))
# Folders like this one that ran already: another environment's launcher may have added its own.
_VISITED = sys.__dict__.setdefault("_warpwatch_bootstraps", set())


def _install() -> None:
    try:
        hooks = importlib.import_module("warpwatch.client.hooks")
    except ImportError:
        # Another interpreter than the one that launched: lend it this copy, and nothing else.
        root = os.path.dirname(os.path.dirname(os.path.dirname(_HERE)))
        sys.path.append(root)
        try:
            hooks = importlib.import_module("warpwatch.client.hooks")
        finally:
            sys.path.remove(root)
    hooks.install()


def _run_hidden() -> None:
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") not in _VISITED]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_first = not _VISITED
_VISITED.add(_HERE)
if _first and os.environ.get("WARPWATCH") == "1":
    try:
        _install()
    except Exception:
        # The program comes first: without the shim it runs as ever.
        sys.modules.pop("warpwatch.client.hooks", None)
_run_hidden()
