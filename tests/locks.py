"""A lock that another thread holds: what a call does that wants it."""

from types import TracebackType


class Waits(Exception):
    """Raised in place of the wait for the lock."""


class Held:
    def __enter__(self) -> None:
        raise Waits

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        return None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and timeout < 0:
            raise Waits
        return False
