"""An inference server in a simulation: its iterations, and its seconds, as the records of an agent.

It batches continuously: prompts in chunks beside requests that decode, a KV cache that may be too
small, prefixes that it knows, several tokens per iteration by speculation. An iteration takes a
fixed time that rises in the steps of CUDA graphs, and parts that follow prompts and KV cache, with
noise that wanders. Requests come with log-normal lengths along a day, in bursts.

Its noise is set by telemetry logs of vLLM 0.32 on two cores. With a forward pass that waits for
0.1 s, as for a GPU, iterations vary by 1 % (robust deviation), in 0.1 to 0.5 % of them by more than
a fifth; samples of a second vary by 0.5 %, with two ranks by 2.6 %. The simulator takes 0.4 to 3 %.
A tiny model without that wait, whose 1.7 ms are all the processor's, varies by 11 %, 2.6 % of its
iterations take twice as long, and the level wanders by 10 % in some seconds: ``shared_cores``.

Where it is not like a server: iterations take 0.08 s or more, since faster ones cost too much here;
ranks have no noise of their own, requests never abort, and prompts are admitted in order. The
request that would last longest is preempted, not the newest. The front end takes no time unless a
fault delays it.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from warpwatch_telemetry.records import LATENCIES, RankSeen, Record, Serve, Step

EPOCH_S = 1_700_000_000.0
DAY_S = 86_400.0
_GRAPHS = (1, 2, 4, *range(8, 513, 8))


@dataclass
class ServerModel:
    """The figures of one server and its load; times in seconds.

    base_s: an iteration of one request; decode_s: more for each request of the graph; prompt_s: for
    1,000 tokens of prompts; kv_s: for 100,000 tokens in the KV cache. noise: of an iteration, as a
    logarithm; wander: of its slow part, which is forgotten in wander_s. slow: the share of
    iterations that take up to 3 times as long. rate: requests per second at noon.
    """

    base_s: float = 0.1
    decode_s: float = 0.001
    prompt_s: float = 0.08
    kv_s: float = 0.02
    noise: float = 0.03
    wander: float = 0.005
    wander_s: float = 150.0
    slow: float = 0.002
    rate: float = 0.5
    prompt_tokens: float = 800.0
    output_tokens: float = 150.0
    most_requests: int = 64
    chunk: int = 2048
    kv_tokens: int = 400_000
    prefix_hits: float = 0.3
    speculation: float = 0.0
    bursts_per_day: float = 12.0
    idle_night: bool = False
    ranks: int = 1

    @classmethod
    def drawn(cls, draw: random.Random, shared_cores: bool = False) -> ServerModel:
        """Return a server of any kind, with a load that it can serve except in bursts."""
        model = cls(
            base_s=draw.uniform(0.08, 0.25),
            noise=draw.uniform(0.01, 0.06),
            wander=draw.uniform(0.0, 0.01),
            prompt_tokens=draw.choice((200.0, 800.0, 3000.0)),
            output_tokens=draw.choice((60.0, 150.0, 400.0)),
            most_requests=draw.choice((32, 64, 128)),
            chunk=draw.choice((512, 2048, 8192)),
            prefix_hits=draw.choice((0.0, 0.3, 0.8)),
            speculation=draw.choice((0.0, 0.0, 0.7)),
            idle_night=draw.random() < 0.3,
        )
        if shared_cores:
            model.noise, model.slow, model.wander, model.wander_s = 0.11, 0.026, 0.1, 6.0
        model.rate = draw.uniform(0.2, 0.55) * model.capacity
        return model

    @property
    def capacity(self) -> float:
        """Requests per second that it can serve in the long run."""
        batch = 0.7 * self.most_requests
        usual_s = self.base_s + batch * self.decode_s + self.kv_s * batch * self.prompt_tokens / 1e5
        decode_s = usual_s * self.output_tokens / (1 + self.speculation) / batch
        # Each chunk of a prompt is an iteration.
        token_s = self.prompt_s / 1e3 + self.base_s / self.chunk
        prompt_s = token_s * self.prompt_tokens * (1 - 0.9 * self.prefix_hits)
        # Lengths are log-normal: their means lie above the medians.
        return 1 / (1.5 * (decode_s + prompt_s))

    def usual_s(self, prefill_tokens: int, decode_requests: int, kv_tokens: int) -> float:
        """Return the time of an iteration without noise."""
        graph = next((g for g in _GRAPHS if g >= decode_requests), decode_requests)
        prompt_s = self.prompt_s * prefill_tokens / 1e3 * (1 + prefill_tokens / 40_000)
        return self.base_s + self.decode_s * graph + prompt_s + self.kv_s * kv_tokens / 1e5


@dataclass
class Fault:
    """A fault from ``begin_s`` to ``end_s``.

    slower, load, cache: factors of the time of iterations, of the rate and of the KV cache.
    front_end_s: how long the front end is blocked before each token.
    """

    begin_s: float = math.inf
    end_s: float = math.inf
    slower: float = 1.0
    load: float = 1.0
    cache: float = 1.0
    front_end_s: float = 0.0


class SimulatedServer:
    """One replica. ``records`` of successive spans go on where the last one ended."""

    def __init__(self, model: ServerModel, seed: int, fault: Fault | None = None) -> None:
        self.model, self.fault = model, fault or Fault()
        self._random = random.Random(seed)
        self.now_s = 0.0
        self._iteration = 0
        # For each running request: the iteration that ends it, its tokens then, its output tokens.
        self._running: list[tuple[int, int, int]] = []
        self._kv = 0
        # Arrival, prompt tokens that are not computed yet, output tokens, all prompt tokens, and 1
        # once it has been scheduled, 2 once it has had its first token.
        self._waiting: deque[list[float]] = deque()
        self._next_s = 0.0
        self._burst_until_s = 0.0
        self._wander = 0.0
        # Since the newest ``Serve``, by the names of its fields; latencies are counts.
        self._sums: defaultdict[str, Any] = defaultdict(int, iterations={})
        self._reported_s = 0.0

    def start(self, at_s: float) -> None:
        """Begin at this time of the first day."""
        self.now_s = self._reported_s = self._next_s = at_s

    def records(self, seconds: float) -> Iterator[Record]:
        """Yield the records of the next ``seconds``."""
        until_s = self.now_s + seconds
        for rank in range(self.model.ranks) if not self._iteration else ():
            time = EPOCH_S + self.now_s
            yield RankSeen(time, "chat", rank, self.model.ranks, kind="serve", run="r")
        while self.now_s < until_s:
            self._arrive()
            if not self._running and not self._waiting:
                pause_s = min(self._next_s, until_s, self._reported_s + 1.0) - self.now_s
                self._sums["idle_s"] += max(0.0, pause_s)
                self.now_s += max(1e-3, pause_s)
            else:
                yield from self._iterate()
            if self.now_s - self._reported_s >= 1.0:
                yield self._serve()

    def _rate(self) -> float:
        model, fault, hour = self.model, self.fault, self.now_s % DAY_S / 3600
        day = 0.55 - 0.45 * math.cos(2 * math.pi * (hour - 3) / 24)
        if model.idle_night and 1 <= hour < 6:
            day = 0.0
        rate = model.rate * day * (2.5 if self.now_s < self._burst_until_s else 1.0)
        return rate * (fault.load if fault.begin_s <= self.now_s < fault.end_s else 1.0)

    def _arrive(self) -> None:
        draw, model = self._random, self.model
        while self._next_s <= self.now_s:
            rate, came_s = self._rate(), self._next_s
            # Without any load, look again after some seconds.
            self._next_s += draw.expovariate(rate) if rate > 1e-6 else 5.0
            if rate <= 1e-6:
                continue
            if draw.random() < model.bursts_per_day / DAY_S / rate:
                self._burst_until_s = self.now_s + draw.uniform(30, 240)
            prompt = min(int(draw.lognormvariate(math.log(model.prompt_tokens), 0.9)) + 1, 60_000)
            output = min(int(draw.lognormvariate(math.log(model.output_tokens), 0.8)) + 2, 4000)
            hit = int(prompt * 0.9) if draw.random() < model.prefix_hits else 0
            self._sums["prefix_hit_tokens"] += hit
            self._sums["prefix_query_tokens"] += prompt
            self._waiting.append([came_s, prompt - hit, output, prompt, 0.0])

    def _iterate(self) -> Iterator[Step]:
        model, draw = self.model, self._random
        faulty = self.fault.begin_s <= self.now_s < self.fault.end_s
        room = model.kv_tokens * (self.fault.cache if faulty else 1.0)
        while self._kv > room and len(self._running) > 1:
            self._preempt()
        decoding = len(self._running)
        prefill, done = self._prefill(room, decoding)
        usual_s = model.usual_s(prefill, decoding, self._kv)
        kept = math.exp(-usual_s / model.wander_s)
        moved = model.wander * math.sqrt(1 - kept * kept) * draw.gauss(0, 1)
        self._wander = kept * self._wander + moved
        took_s = usual_s * math.exp(model.noise * draw.gauss(0, 1) + self._wander)
        if draw.random() < model.slow:
            took_s *= draw.uniform(1.2, 3.0)
        took_s *= self.fault.slower if faulty else 1.0
        self.now_s += took_s
        self._iteration += 1
        self._finish(done, decoding, took_s, self.fault.front_end_s if faulty else 0.0)
        kind = "mixed" if prefill and decoding else "prefill" if prefill else "decode"
        count, seconds = self._sums["iterations"].get(kind, (0, 0.0))
        self._sums["iterations"][kind] = count + 1, seconds + took_s
        self._sums["prompt_tokens"] += prefill
        for rank in range(model.ranks):
            yield Step(
                EPOCH_S + self.now_s, "chat", rank, self._iteration, took_s, run="r",
                phases_s={"forward": 0.9 * took_s}, work_class=kind,  # type: ignore[arg-type]
                prefill_tokens=prefill, decode_requests=decoding, kv_tokens=self._kv,
            )  # fmt: skip

    def _prefill(self, room: float, decoding: int) -> tuple[int, list[list[float]]]:
        """Return the tokens of prompts that this iteration computes, and the requests they end."""
        budget, computed = self.model.chunk, 0
        done: list[list[float]] = []
        while self._waiting and computed < budget:
            request = self._waiting[0]
            full = decoding + len(done) >= self.model.most_requests
            if full or (self._kv + request[3] > room and self._running):
                break
            if not request[4]:
                request[4] = 1.0
                self._sums["queue"] += 1
                self._sums["queue_s"] += self.now_s - request[0]
            part = int(min(request[1], budget - computed))
            request[1] -= part
            computed += max(part, 1)
            if request[1] > 0:
                break
            done.append(self._waiting.popleft())
            self._kv += int(request[3])
        return computed, done

    def _finish(
        self, done: list[list[float]], decoding: int, took_s: float, blocked_s: float
    ) -> None:
        sums, per_pass = self._sums, 1 + self.model.speculation
        tokens = int(decoding * per_pass)
        self._kv += tokens
        sums["generated_tokens"] += tokens + len(done)
        # vLLM observes one latency per request and iteration, however many tokens it had.
        sums["inter_token"] += decoding
        sums["inter_token_s"] += decoding * (took_s + blocked_s)
        for request in done:
            if request[4] < 2:
                sums["first_token"] += 1
                sums["first_token_s"] += self.now_s - request[0] + blocked_s
            end = self._iteration + max(1, int(request[2] / per_pass))
            heapq.heappush(self._running, (end, int(request[3] + request[2]), int(request[2])))
        while self._running and self._running[0][0] <= self._iteration:
            self._kv = max(0, self._kv - heapq.heappop(self._running)[1])

    def _preempt(self) -> None:
        """Take the place of the request that lasts longest; it is computed again."""
        longest = max(self._running)
        self._running.remove(longest)
        heapq.heapify(self._running)
        left = max(1, longest[0] - self._iteration)
        has = max(1, longest[1] - int(left * (1 + self.model.speculation)))
        self._kv = max(0, self._kv - has)
        self._waiting.appendleft([self.now_s, has, left, has, 2.0])
        self._sums["preemptions"] += 1

    def _serve(self) -> Serve:
        sums, self._sums = self._sums, defaultdict(int, iterations={})
        passed_s, self._reported_s = self.now_s - self._reported_s, self.now_s
        sums["idle_s"] = min(sums["idle_s"], passed_s)
        # All observations are in the first bucket: nothing reads the others here.
        sums |= {name: {0: sums[name]} if sums[name] else {} for name in LATENCIES}
        return Serve(
            EPOCH_S + self.now_s, "chat", run="r", interval_s=passed_s,
            running=len(self._running), waiting=len(self._waiting),
            kv_usage=min(1.0, self._kv / self.model.kv_tokens), **sums,
        )  # fmt: skip
