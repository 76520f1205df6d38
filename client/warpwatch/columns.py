"""Many steps at once: what is known of them as columns, so that C alone works through them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import add, sub

# Where what steps add to the totals holds samples, tokens and ns: after a step, and the newest step
# plus 1; before ns of each phase.
SAMPLES, TOKENS, DURATION = 2, 3, 4
# What is noted of a lap: when data were asked for and given, their samples and tokens in the same
# places as above, when backward was called and returned, the update began and ended.
ASKED, GIVEN, CALLED, RETURNED, UPDATED, ENDED = 0, 1, 4, 5, 6, 7
LAP_LENGTH = 8
# Phases of a lap: wait for data, what follows, backward, optimizer.
LapPhases = tuple[int, int, int, int]


# Of each a number for every step: flags, wall clock ns at the end, number, GPU ns, allocated bytes;
# and the columns that the totals sum, in their order. What is the same for all may go on for ever.
# A plain tuple: a named one's constructor is a frame that torch.compile would look at.
Numbers = Iterable[int]
Steps = tuple[Numbers, Numbers, Numbers, Numbers, Numbers, Sequence[Sequence[int]]]


def blank(steps: int, length: int) -> list[Sequence[int]]:
    """Columns of steps that have spent nothing."""
    ones, zeros = (1,) * steps, (0,) * steps
    return [ones, ones, *[zeros] * (length - 2)]


def between(first_ns: int, times_ns: Sequence[int]) -> list[int]:
    """What has passed up to each time since the one before it."""
    return [*map(sub, times_ns, chain((first_ns,), times_ns))]


def spent_in_laps(
    laps: Sequence[int], phases: LapPhases, begun_ns: int, length: int
) -> list[Sequence[int]]:
    """``laps``: LAP_LENGTH numbers of each, one after the other. The first began ``begun_ns``."""
    noted = [laps[place::LAP_LENGTH] for place in range(LAP_LENGTH)]
    spent = blank(len(noted[ENDED]), length)
    spent[SAMPLES], spent[TOKENS] = noted[SAMPLES], noted[TOKENS]
    parts = (ASKED, GIVEN), (GIVEN, CALLED), (CALLED, RETURNED), (UPDATED, ENDED)
    for phase, (begun, left) in zip(phases, parts):
        spent[phase] = [*map(sub, noted[left], noted[begun])]
    spent[DURATION] = between(begun_ns, noted[ENDED])
    return spent


def spent_in_phases(
    times_ns: Sequence[int], phases: Sequence[int], begun_ns: int, length: int
) -> list[Sequence[int]]:
    """Of steps with the same borders: ``phases`` were innermost before each of those of a step.

    ``times_ns``: of all borders, one step after the other; the last of each is its end.
    """
    borders = len(phases)
    gaps = between(begun_ns, times_ns)
    spent = blank(len(gaps) // borders, length)
    for place, phase in enumerate(phases):
        if phase != DURATION:
            spent[phase] = [*map(add, spent[phase], gaps[place::borders])]
    spent[DURATION] = between(begun_ns, times_ns[borders - 1 :: borders])
    return spent
