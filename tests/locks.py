"""A lock that another thread holds, for tests of what waits for it."""

from unittest.mock import MagicMock


class Waits(Exception):
    """Raised in place of the wait."""


def held() -> MagicMock:
    lock = MagicMock()
    lock.__enter__.side_effect = Waits
    lock.acquire.return_value = False
    return lock
