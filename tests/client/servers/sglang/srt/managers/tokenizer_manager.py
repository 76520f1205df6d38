"""The front end with the name that the hooks use, as in SGLang 0.5.23."""

from typing import Any


class TokenizerManager:
    def __init__(self, server_args: Any) -> None:
        self.server_args = server_args
