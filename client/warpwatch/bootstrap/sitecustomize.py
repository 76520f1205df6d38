"""Runs at the start of every Python program under ``warpwatch run``, before the program itself.

Waits for the first import of a library that trains, then installs the hooks: a program without one
pays next to nothing. Runs the sitecustomize that this file hides, if there is one.
"""
# ruff: noqa: INP001 (a folder on PYTHONPATH, no package)

import importlib
import os
import sys
from importlib.machinery import PathFinder

# Where the modules of warpwatch.hooks.HOOKS are: before these there is nothing to hook.
LIBRARIES = (
    "accelerate", "deepspeed", "fastai", "keras", "lightning", "lightning_fabric",
    "pytorch_lightning", "sglang", "torch", "transformers", "vllm",
)  # fmt: skip
_HERE = os.path.dirname(os.path.abspath(__file__))
# Folders like this one that ran already: another environment's launcher may have added its own.
_VISITED = sys.__dict__.setdefault("_warpwatch_bootstraps", set())


class _FirstImport:
    """A finder that installs the hooks at the first import of one of LIBRARIES."""

    def find_spec(self, name, path=None, target=None):  # type: ignore[no-untyped-def]
        if name not in LIBRARIES or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        try:
            _install()
        except Exception:
            # The program comes first: without the shim it runs as ever.
            sys.modules.pop("warpwatch.hooks", None)
        # The import under way goes by the finders that it began with.
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                return spec
        return None


def _install() -> None:
    try:
        hooks = importlib.import_module("warpwatch.hooks")
    except ImportError:
        # Another interpreter than the one that launched: lend it this copy, and nothing else.
        # The name may have matched a folder that is not a package.
        sys.modules.pop("warpwatch", None)
        root = os.path.dirname(os.path.dirname(_HERE))
        sys.path.append(root)
        try:
            hooks = importlib.import_module("warpwatch.hooks")
        finally:
            sys.path.remove(root)
    hooks.install()


def _run_hidden() -> None:
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") not in _VISITED]
    spec = PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.import_module("importlib.util").module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


_first = not _VISITED
_VISITED.add(_HERE)
if _first and os.environ.get("WARPWATCH") == "1":
    sys.meta_path.insert(0, _FirstImport())
_run_hidden()
