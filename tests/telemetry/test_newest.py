"""Mappings of bounded size."""

from warpwatch_telemetry.newest import NewestMap, put_newest


def test_the_newest_entries_stay_and_setting_an_old_one_renews_it() -> None:
    plain: dict[str, int] = {}
    bounded: NewestMap[str, int] = NewestMap(3)
    for number, key in enumerate("abcadb"):
        put_newest(plain, key, number, 3)
        bounded[key] = number
    assert list(plain.items()) == list(bounded.items()) == [("a", 3), ("d", 4), ("b", 5)]
