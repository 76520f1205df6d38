"""The processes of engines with the names that the hooks use, as in vLLM 0.32."""

from types import SimpleNamespace


class CoreEngineProcManager:
    def __init__(self, statuses: list[int | None]) -> None:
        self.processes = [SimpleNamespace(exitcode=status) for status in statuses]

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing."""
