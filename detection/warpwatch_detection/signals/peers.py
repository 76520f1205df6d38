"""A rank's time beside that of the ranks which do the same work, as the log of the ratio.

Effects on all ranks (long batches, checkpoints, a new regime, noise of the job) cancel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from warpwatch_detection.detector import JobStep
from warpwatch_detection.signals.medians import medians_without_one

# Time counts as proportional to work until this much squared change of log work has been seen.
PRIOR_WEIGHT = 0.05
# From this much on, older steps count less.
MAX_WEIGHT = 20.0
MAX_EXPONENT = 2.0
# One pause must not teach anything: changes of log compute beyond what work may explain are cut
# here (±65 %).
MAX_CHANGE = 0.5


@dataclass(slots=True)
class WorkScaling:
    products: float = PRIOR_WEIGHT
    squares: float = PRIOR_WEIGHT
    before: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def exponent(self) -> float:
        return min(max(self.products / self.squares, 0.0), MAX_EXPONENT)

    def explained(
        self, log_times: Mapping[int, float], work: Mapping[int, int]
    ) -> dict[int, float]:
        """The part of each rank's log time that its work explains.

        Nothing where work is not known of every rank, or is the same for all.
        """
        amounts = work.values()
        if len(work) < len(log_times) or len(set(amounts)) < 2 or min(amounts) <= 0:
            return {}
        log_work = {rank: math.log(work[rank]) for rank in log_times}
        exponent = self.exponent
        self._learn(log_times, log_work)
        return {rank: exponent * value for rank, value in log_work.items()}

    def _learn(self, log_times: Mapping[int, float], log_work: Mapping[int, float]) -> None:
        count = len(log_times)
        mean_time = sum(log_times.values()) / count
        mean_work = sum(log_work.values()) / count
        now: dict[int, tuple[float, float]] = {}
        for rank, log_time in log_times.items():
            now[rank] = (log_work[rank] - mean_work, log_time - mean_time)
            if (before := self.before.get(rank)) is not None:
                change = now[rank][0] - before[0]
                most = MAX_CHANGE + MAX_EXPONENT * abs(change)
                slower = min(max(now[rank][1] - before[1], -most), most)
                self.products += change * slower
                self.squares += change * change
        self.before = now
        if self.squares > MAX_WEIGHT:
            self.products /= 2
            self.squares /= 2


# Ranks that hardly compute are not compared: below this share of the step all are alike.
LEAST_SHARE = 0.01
# The group of a rank that has no like: it is compared with all others.
ALONE = -1


class PeerRatios(msgspec.Struct):
    """One step, per rank. ratios: log of its time over its peers'; references: log of theirs.

    explained: the part of the log of its time that its work explains, taken off in the others.
    """

    ratios: dict[int, float]
    references: dict[int, float]
    explained: dict[int, float]


def stages(
    places: Mapping[int, Mapping[str, tuple[int, int]]],
) -> tuple[dict[int, int], bool | None]:
    """Return the groups of ranks that do the same work by where they stand, and whether they do.

    A group is a stage of a pipeline, with the same experts where every rank has such a like. Per
    rank the number of its group, ALONE without a like; empty where ranks of unknown or unequal work
    are not split. The second value is None if a rank's place is unknown, and False if ranks of a
    group hold different experts, which never get the same number of tokens.
    """
    for kinds in (("pipeline", "expert"), ("pipeline",)):
        keys = {
            rank: tuple(place.get(kind, (0, 1))[0] for kind in kinds)
            for rank, place in places.items()
        }
        sizes = Counter(keys.values())
        if min(sizes.values(), default=0) > 1:
            break
    is_mixed = "expert" not in kinds and any(
        place.get("expert", (0, 1))[1] > 1 for place in places.values()
    )
    alike = not is_mixed if places and all(places.values()) else None
    numbers = {key: number for number, key in enumerate(sorted(sizes))}
    if len(numbers) < 2 and not (alike and len(places) > 1):
        return {}, alike
    return {rank: numbers[key] if sizes[key] > 1 else ALONE for rank, key in keys.items()}, alike


def compare(seen: JobStep, scaling: WorkScaling, groups: Mapping[int, int]) -> PeerRatios:
    """Every rank with its peers, by what it computes; of two ranks or more.

    One whose stage is known and has no other rank is compared with no one.
    """
    least_s = max(LEAST_SHARE * seen.duration_s, 1e-9)
    times = {
        rank: math.log(time_s if time_s > least_s else least_s)
        for rank, time_s in seen.compute_s.items()
    }
    explained = scaling.explained(times, seen.tokens or seen.samples)
    if explained:
        times = {rank: value - explained[rank] for rank, value in times.items()}
    found = PeerRatios({}, {}, explained)
    ordered = sorted(times.values())
    if seen.stages:
        for some, peers in _parted(times, seen.stages, ()):
            _compare(some, peers, found)
    elif groups and (len(set(groups.values())) > 1 or not times.keys() <= groups.keys()):
        for some, peers in _parted(times, groups, ordered):
            _compare(some, peers, found)
        found.ratios = {rank: found.ratios[rank] for rank in times}
    else:
        _compare(times, ordered, found)
    return found


def _parted(
    times: Mapping[int, float], groups: Mapping[int, int], ordered: Sequence[float]
) -> Iterator[tuple[Mapping[int, float], Sequence[float]]]:
    """The ranks of each group, and those that they are compared with.

    A group of one is compared with ``ordered``, all ranks, if that is not empty.
    """
    members: dict[int, dict[int, float]] = {}
    for rank, value in times.items():
        members.setdefault(groups.get(rank, ALONE), {})[rank] = value
    for group, some in members.items():
        alone = group == ALONE or len(some) == 1
        if ordered or not alone:
            yield some, ordered if alone else sorted(some.values())


def _compare(times: Mapping[int, float], ordered: Sequence[float], found: PeerRatios) -> None:
    """Each with the median of ``ordered`` (two values at least) without its own, which is in it."""
    middle, of_lower, of_middle, of_upper = medians_without_one(ordered)
    ratios, references = found.ratios, found.references
    for rank, own in times.items():
        peers = of_lower if own < middle else of_upper if own > middle else of_middle
        references[rank] = peers
        ratios[rank] = own - peers


def group_by_level(levels: Mapping[int, float], gap: float) -> dict[int, int]:
    """Ranks whose levels lie closer than ``gap`` to a neighbour do the same work.

    Per rank the number of its group, ALONE without a like. Stages of a pipeline come out as
    groups: their ranks differ from others from the start, and agree among themselves.
    """
    ordered = sorted(levels, key=lambda rank: levels[rank])
    groups: list[list[int]] = []
    for rank in ordered:
        if groups and levels[rank] - levels[groups[-1][-1]] < gap:
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return {
        rank: number if len(group) > 1 else ALONE
        for number, group in enumerate(groups)
        for rank in group
    }
