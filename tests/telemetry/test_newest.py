"""A mapping of bounded size, of which the newest stays."""

from __future__ import annotations

from warpwatch_telemetry.newest import put_newest


def test_what_was_put_longest_ago_goes_first() -> None:
    kept: dict[str, int] = {}
    for number, key in enumerate("abcad"):
        put_newest(kept, key, number, 3)
    assert list(kept.items()) == [("c", 2), ("a", 3), ("d", 4)]
