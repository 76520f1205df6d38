"""The loading of plug-ins, as in vLLM 0.32."""

import os
from importlib.metadata import entry_points


def load_general_plugins() -> None:
    allowed = os.environ.get("VLLM_PLUGINS")
    for plugin in entry_points(group="vllm.general_plugins"):
        if allowed is None or plugin.name in allowed.split(","):
            plugin.load()()
