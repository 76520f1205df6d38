from __future__ import annotations

from functools import partial

from warpwatch_daemon.captures.fair_queue import FairQueue


def test_owners_are_served_in_turn_however_much_one_of_them_has() -> None:
    queue, done = FairQueue(10), list[str]()
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        assert queue.put(name[0], partial(done.append, name))
    while queue.do_next():
        pass
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_an_owner_with_too_much_has_no_more_taken_and_others_have() -> None:
    queue, done = FairQueue(2), list[str]()
    taken = [queue.put("a", partial(done.append, str(n))) for n in range(4)]
    assert taken == [True, True, False, False]
    assert queue.put("b", partial(done.append, "b"))
    assert [queue.do_next() for _ in range(4)] == [True, True, True, False]
    assert done == ["0", "b", "1"]


def test_work_that_fails_is_not_done_again() -> None:
    queue = FairQueue(2)
    queue.put("a", partial(int, "x"))
    try:
        queue.do_next()
    except ValueError:
        assert not queue.do_next()
