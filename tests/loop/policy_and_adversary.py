"""Programs that know nothing of Warpwatch, for ``warpwatch run``, until they are killed.

``policy_and_adversary.py ppo``: a rollout of a simulation in Python, then some updates by what it
brought. ``… gan`` and ``… slow_gan``: two optimizers in turn; the slow one's batches are made in
the step. One process each, and one thread computes.
"""

from __future__ import annotations

import gc
import itertools
import sys
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tests.diagnosis.recorded_faults import Policy, Training

UPDATES, MINIBATCH = 4, 16


def ppo() -> None:
    policy, critic = Policy(), nn.Linear(16, 1)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()], lr=3e-4)
    start = torch.randn(1, 16)
    while True:
        seen = policy.rollout(start)
        with torch.no_grad():
            before = policy(seen).log_softmax(-1)
            advantages = seen.sum(1) - critic(seen)[:, 0]
        for _ in range(UPDATES):
            chosen = torch.randperm(len(seen))[:MINIBATCH]
            loss = clipped(policy, seen[chosen], before[chosen], advantages[chosen])
            loss = loss + (critic(seen[chosen])[:, 0] - seen[chosen].sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def clipped(policy: Policy, seen: Tensor, before: Tensor, advantages: Tensor) -> Tensor:
    ratio = (policy(seen).log_softmax(-1) - before)[:, 0].exp()
    return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()


def gan(batches: Iterable[tuple[Tensor, Tensor]], training: Training) -> None:
    gc.freeze()
    for number, (given, labels) in enumerate(batches):
        training.step(number, given, labels)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if sys.argv[1] == "ppo":
        ppo()
    elif sys.argv[1] == "gan":
        training = Training("healthy", "adversarial")
        # All samples are in memory.
        gan(itertools.repeat(next(training.batches())), training)
    else:
        training = Training("no_workers", "adversarial", scale=0.1)
        gan(training.batches(), training)
