"""Compares a rank's time with that of the ranks that do the same work, as the log of the ratio.

Effects on all ranks (long batches, checkpoints, a new regime, noise of the job) cancel.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from warpwatch_detection.detector import JobStep
from warpwatch_detection.signals.baselines import medians_without_one

# Time is assumed proportional to work (exponent 1) with this weight: as if work had already changed
# by this much, in squared changes of its log.
PRIOR_WEIGHT = 0.05
# Above this weight old steps are forgotten: both sums are halved.
MAX_WEIGHT = 20.0
MAX_EXPONENT = 2.0
# One pause must not change the exponent: of a change of log time, at most this much (65 %) counts
# beyond what work may explain.
MAX_CHANGE = 0.5


@dataclass(slots=True)
class WorkScaling:
    """Learns the exponent of work: a rank's time is proportional to its work to this power.

    It is a regression of the changes of log time on those of log work, both relative to the mean of
    the ranks. before: by rank, log work and log time at the last step, relative to these means.
    """

    products: float = PRIOR_WEIGHT
    squares: float = PRIOR_WEIGHT
    before: dict[int, tuple[float, float]] = field(default_factory=dict)

    @property
    def exponent(self) -> float:
        return min(max(self.products / self.squares, 0.0), MAX_EXPONENT)

    def explained(
        self, log_times: Mapping[int, float], work: Mapping[int, int]
    ) -> dict[int, float]:
        """Return the part of each rank's log time that its work explains, and learn from the step.

        The result is empty if the work of a rank is unknown, or the work of all ranks is equal.
        """
        amounts = work.values()
        if len(work) < len(log_times) or len(set(amounts)) < 2:
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


# Compute below this share of the step counts as this share: ranks that hardly compute are alike.
LEAST_SHARE = 0.01
# The group of a rank without peers: it is compared with all other ranks.
ALONE = -1


class PeerRatios(msgspec.Struct):
    """One step, by rank.

    ratios: the log of the rank's time over its peers' time. references: the log of its peers' time.
    explained: the part of the log of its time that its work explains; both others are without it.
    """

    ratios: dict[int, float]
    references: dict[int, float]
    explained: dict[int, float]


def stages(
    places: Mapping[int, Mapping[str, tuple[int, int]]],
) -> tuple[dict[int, int], bool | None]:
    """Return each rank's group by its place, and whether the ranks of a group do equal work.

    A group is a stage of a pipeline, divided by experts if every rank then still has a peer. A rank
    without a peer gets ALONE. The groups are empty if all ranks would be in one and do not do equal
    work. The second value is None if a rank's place is unknown, and False if ranks of a group hold
    different experts, which never get the same number of tokens.
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
    """Compare the compute time of each rank with its peers; ``seen`` has two ranks or more.

    Peers are the ranks of the same stage, or of the same group in ``groups`` if no stages are
    known. A rank alone in its stage is not compared.
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
        for members, peers in _split(times, seen.stages, ()):
            _compare(members, peers, found)
    elif groups and (len(set(groups.values())) > 1 or not times.keys() <= groups.keys()):
        for members, peers in _split(times, groups, ordered):
            _compare(members, peers, found)
    else:
        _compare(times, ordered, found)
    return found


def _split(
    times: Mapping[int, float], groups: Mapping[int, int], ordered: Sequence[float]
) -> Iterator[tuple[Mapping[int, float], Sequence[float]]]:
    """Yield the ranks of each group, and the sorted times that they are compared with.

    A rank that is alone is compared with ``ordered``, the times of all ranks; if that is empty, the
    rank is ignored.
    """
    by_group: dict[int, dict[int, float]] = {}
    for rank, value in times.items():
        by_group.setdefault(groups.get(rank, ALONE), {})[rank] = value
    for group, members in by_group.items():
        alone = group == ALONE or len(members) == 1
        if ordered or not alone:
            yield members, ordered if alone else sorted(members.values())


def _compare(times: Mapping[int, float], ordered: Sequence[float], found: PeerRatios) -> None:
    """Compare each time with the median of the others in ``ordered``, which has two or more."""
    middle, of_lower, of_middle, of_upper = medians_without_one(ordered)
    ratios, references = found.ratios, found.references
    for rank, own in times.items():
        peers = of_lower if own < middle else of_upper if own > middle else of_middle
        references[rank] = peers
        ratios[rank] = own - peers


def group_by_level(levels: Mapping[int, float], gap: float) -> dict[int, int]:
    """Return each rank's group by its level: neighbours closer than ``gap`` do the same work.

    A rank without a peer gets ALONE. So the stages of a pipeline become groups: from the start
    their ranks differ from others, and agree with each other.
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
