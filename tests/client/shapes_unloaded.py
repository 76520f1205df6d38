"""The shapes of public training programs without a DataLoader. Each has a loss a step."""

import copy
import random
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from tests.client.shapes import BATCH, BLOCK, VOCABULARY, WIDTH, LanguageModel, network


def nanogpt() -> Iterator[float]:
    return language_model(LanguageModel())


def nanogpt_compiled() -> Iterator[float]:
    return language_model(torch.compile(LanguageModel(), backend="eager"))


def language_model(model: Any) -> Iterator[float]:
    text = torch.randint(VOCABULARY, (4096,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cpu", enabled=False)

    def get_batch() -> Any:
        starts = torch.randint(len(text) - BLOCK, (8,))
        x = torch.stack([text[start : start + BLOCK] for start in starts])
        return x, torch.stack([text[start + 1 : start + 1 + BLOCK] for start in starts])

    @torch.no_grad()  # type: ignore[untyped-decorator]
    def estimate_loss() -> None:
        model.eval()
        for _ in range(15):
            model(*get_batch())
        model.train()

    x, y = get_batch()
    for number in range(12):
        if number % 10 == 0:
            estimate_loss()
        for _ in range(4):
            loss = model(x, targets=y)[1] / 4
            x, y = get_batch()
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        yield loss.item()


class Recurrent(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, 128)
        self.recurrent = torch.nn.LSTM(128, 128)
        self.head = torch.nn.Linear(128, VOCABULARY)

    def forward(self, ids: Any, hidden: Any) -> Any:
        found, hidden = self.recurrent(self.embedding(ids), hidden)
        return self.head(found).flatten(0, 1), hidden


def updates_by_hand() -> Iterator[float]:
    """word_language_model: neither torch.optim nor a DataLoader."""
    model, text = Recurrent(), torch.randint(VOCABULARY, (85 * 32 + 1, 16))

    def evaluate() -> None:
        model.eval()
        hidden = None
        with torch.no_grad():
            for start in range(0, 10 * 32, 32):
                _, hidden = model(text[start : start + 32], hidden)

    hidden = None
    for number, start in enumerate(range(0, len(text) - 1, 32)):
        if number == 70:
            evaluate()
        model.train()
        model.zero_grad()
        hidden = hidden and tuple(part.detach() for part in hidden)
        scores, hidden = model(text[start : start + 32], hidden)
        loss = F.cross_entropy(scores, text[start + 1 : start + 33].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.1)
        yield loss.item()


# The two networks of PPO are this wide, so that the code around them takes little time.
WIDE = 2 * WIDTH, 2 * WIDTH


class Environment:
    """A world that takes as long as a network to answer."""

    def __init__(self, worlds: int) -> None:
        self._state, self._turn = torch.randn(worlds, WIDTH), torch.randn(WIDTH, WIDTH) / 16

    def step(self, actions: Any) -> tuple[Any, Any]:
        self._state = torch.tanh(self._state @ self._turn + actions[:, None] / 10)
        return self._state, self._state.mean(1)


def ppo() -> Iterator[float]:
    """The policy acts without gradients, then learns of that in minibatches."""
    actor, critic = network(WIDTH, *WIDE, 4), network(WIDTH, *WIDE, 1)
    parameters = [*actor.parameters(), *critic.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=1e-4, eps=1e-5)
    environment, observed = Environment(64), torch.zeros(64, WIDTH)
    for _ in range(3):
        taken = []
        for _ in range(16):
            with torch.no_grad():
                choice = torch.distributions.Categorical(logits=actor(observed))
                action = choice.sample()
                before = observed, action, choice.log_prob(action), critic(observed).flatten()
            observed, reward = environment.step(action)
            taken.append((*before, reward))
        with torch.no_grad():
            advantage, following = torch.zeros(64), critic(observed).flatten()
            advantages = []
            for *_, value, reward in reversed(taken):
                advantage = reward + 0.99 * following - value + 0.94 * advantage
                following = value
                advantages.append(advantage)
        states, actions, odds, values, _ = (torch.cat(parts) for parts in zip(*taken, strict=True))
        gained = torch.cat(advantages[::-1])
        for _ in range(2):
            for chosen in torch.randperm(len(states)).split(256):
                policy = torch.distributions.Categorical(logits=actor(states[chosen]))
                ratio = (policy.log_prob(actions[chosen]) - odds[chosen]).exp()
                target = (gained + values)[chosen]
                error = (critic(states[chosen]).flatten() - target).square().mean()
                loss = error - (gained[chosen] * ratio.clamp(0.8, 1.2)).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
                yield loss.item()


def dqn() -> Iterator[float]:
    """It acts with gradients on, and learns of a replay buffer at every fourth turn."""
    online = network(WIDTH, WIDTH, WIDTH, 4)
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam(online.parameters(), lr=1e-4)
    environment, observed = Environment(1), torch.zeros(1, WIDTH)
    replay: deque[Any] = deque(maxlen=500)
    for turn in range(200):
        is_random = random.random() < 0.1
        action = torch.randint(4, (1,)) if is_random else online(observed).argmax(1)
        before = observed
        observed, reward = environment.step(action)
        replay.append((before, action, reward, observed))
        if turn < 20 or turn % 4:
            continue
        drawn = zip(*random.choices(replay, k=BATCH), strict=True)
        states, actions, rewards, following = (torch.cat(parts) for parts in drawn)
        with torch.no_grad():
            wanted = rewards + 0.99 * target(following).amax(1)
        loss = F.mse_loss(online(states).gather(1, actions[:, None]).flatten(), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
        if turn % 50 == 0:
            target.load_state_dict(online.state_dict())


def td3() -> Iterator[float]:
    """The actor learns at every second step of the critic, after its first ones."""
    actor, critic = network(WIDTH, WIDTH, WIDTH, 4), network(WIDTH + 4, WIDTH, WIDTH, 1)
    aims = copy.deepcopy(actor), copy.deepcopy(critic)
    of_critic, of_actor = (torch.optim.Adam(net.parameters(), 3e-4) for net in (critic, actor))
    for turn in range(1, 51):
        states, following = torch.randn(2, BATCH, WIDTH)
        with torch.no_grad():
            actions = actor(states) + torch.randn(BATCH, 4) / 10
            later = aims[0](following) + torch.randn(BATCH, 4) / 5
            wanted = states.mean(1) + 0.99 * aims[1](torch.cat([following, later], 1)).flatten()
        loss = F.mse_loss(critic(torch.cat([states, actions], 1)).flatten(), wanted)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        yield loss.item()
        if turn % 2 == 0:
            of_actor.zero_grad()
            (-critic(torch.cat([states, actor(states)], 1)).mean()).backward()
            of_actor.step()


def optimizers_after_one_another() -> Iterator[float]:
    """forward_forward: each layer learns alone, of what the ones before it give."""
    layers = [network(WIDTH, 2 * WIDTH, WIDTH) for _ in range(2)]
    steppers = [torch.optim.Adam(layer.parameters(), 1e-3) for layer in layers]
    good, bad = torch.randn(2, BATCH, WIDTH)
    for layer, optimizer in zip(layers, steppers, strict=True):
        for _ in range(25):
            scores = [layer(rows).square().mean(1) for rows in (good, bad)]
            loss = F.softplus(torch.cat([2 - scores[0], scores[1] - 2])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.item()
        good, bad = layer(good).detach(), layer(bad).detach()
