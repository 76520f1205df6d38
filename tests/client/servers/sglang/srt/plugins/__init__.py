"""The loading of plug-ins, as in SGLang 0.5.23."""

import os
from importlib.metadata import entry_points

from sglang.srt.plugins.hook_registry import HookRegistry


def load_plugins() -> None:
    allowed = os.environ.get("SGLANG_PLUGINS")
    for plugin in entry_points(group="sglang.srt.plugins"):
        if not allowed or plugin.name in allowed.split(","):
            plugin.load()()
    HookRegistry.apply_hooks()
