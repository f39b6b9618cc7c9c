"""The course of events: rollouts start, call, wait for tools, and end, while servers come and go."""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .servers import Server
from .workload import Rollout, workload

_REFUSED_SECONDS = 0.05  # until a call to a dead server has failed


class Balancer(Protocol):
    """One way to share rollouts among servers."""

    def servers_changed(self, servers: Sequence[Server], now: float) -> None:
        """One was added, has died or is back."""
        ...

    def start(self, waiting: Sequence[Rollout], now: float) -> dict[int, Server]:
        """Which of those waiting start now, by their numbers, and on which server they are."""
        ...

    def server_for(self, rollout: Rollout, now: float) -> Server | None:
        """For its next call; None: try again a second later. `rollout.failed_on` are those where this call has failed."""
        ...

    def ended(self, rollout: Rollout, now: float) -> None: ...


class Scenario(NamedTuple):
    """How many there are of what, and when (seconds) a server is added, dies, and is back."""

    groups: int = 60
    servers: int = 4
    capacity: int = 48
    added_at: float = 60.0
    dies_at: float = 90.0
    back_at: float = 130.0


class Outcome(NamedTuple):
    """What came of it. Latencies in seconds, shares from 0 to 1."""

    turns: list[float]
    rollouts: list[float]
    makespan: float
    utilisation: float
    prefix_hits: float

    def turn(self, percent: int) -> float:
        return percentile(self.turns, percent)

    def rollout(self, percent: int) -> float:
        return percentile(self.rollouts, percent)


def percentile(values: Sequence[float], percent: int) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


@dataclass(order=True)
class _Event:
    at: float
    order: int
    act: Callable[[], None] = field(compare=False)


class World:
    """One simulation."""

    def __init__(self, scenario: Scenario, seed: int, balancer: Balancer) -> None:
        self._scenario = scenario
        self._balancer = balancer
        self._rollouts = workload(seed, scenario.groups)
        self._waiting = list(self._rollouts)
        self._servers = [Server(number, scenario.capacity) for number in range(scenario.servers)]
        self._events: list[_Event] = []
        self._order = itertools.count()
        self._end_order: dict[int, int] = {}  # of the event that ends a server's next call; earlier ones are void
        self._now = 0.0
        self._turns: list[float] = []
        self._took: list[float] = []
        self._seconds_there = 0.0  # of all servers
        self._since = 0.0

    def run(self) -> Outcome:
        self._changed()
        for at, act in (
            (self._scenario.added_at, self._add),
            (self._scenario.dies_at, self._die),
            (self._scenario.back_at, self._revive),
        ):
            self._later(at, act)
        self._start()
        while len(self._took) < len(self._rollouts):
            event = heapq.heappop(self._events)
            self._now = event.at
            event.act()
        self._count_seconds()
        most = Server.most_work(self._seconds_there, self._scenario.capacity)
        return Outcome(
            self._turns,
            self._took,
            self._now,
            sum(server.work_done for server in self._servers) / most,
            sum(s.found_blocks for s in self._servers) / sum(s.prompt_blocks for s in self._servers),
        )

    # --- Rollouts ----------------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if not self._waiting:
            return
        started = self._balancer.start(self._waiting, self._now)
        self._waiting = [rollout for rollout in self._waiting if rollout.number not in started]
        for number, server in started.items():
            rollout = self._rollouts[number]
            rollout.begun = rollout.asked = self._now
            self._call(rollout, server)

    def _next_call(self, rollout: Rollout) -> None:
        server = self._balancer.server_for(rollout, self._now)
        if server is None:
            self._later(self._now + 1.0, lambda: self._next_call(rollout))
        else:
            self._call(rollout, server)

    def _call(self, rollout: Rollout, server: Server) -> None:
        if not server.alive:
            self._later(self._now + _REFUSED_SECONDS, lambda: self._failed(rollout, server))
            return
        server.begin(self._now, rollout.number, rollout.blocks(), rollout.turns[rollout.turn].output)
        self._expect_end(server)

    def _failed(self, rollout: Rollout, server: Server) -> None:
        rollout.failed_on.add(server.number)
        self._next_call(rollout)

    def _replied(self, rollout: Rollout) -> None:
        turn = rollout.turns[rollout.turn]
        self._turns.append(self._now - rollout.asked)
        rollout.failed_on.clear()
        rollout.own += turn.output + turn.observation
        rollout.turn += 1
        if rollout.turn == len(rollout.turns):
            assert rollout.begun is not None
            self._took.append(self._now - rollout.begun)
            self._balancer.ended(rollout, self._now)
            self._start()
            return

        def go_on() -> None:
            rollout.asked = self._now
            self._next_call(rollout)

        self._later(self._now + turn.pause, go_on)

    # --- Servers -----------------------------------------------------------------------------------------------------------

    def _add(self) -> None:
        self._count_seconds()
        self._servers.append(Server(len(self._servers), self._scenario.capacity))
        self._changed()
        self._start()

    def _die(self) -> None:
        self._count_seconds()
        server = self._servers[0]
        failed = server.die(self._now)
        self._end_order.pop(server.number, None)
        self._changed()
        for number in failed:
            self._failed(self._rollouts[number], server)

    def _revive(self) -> None:
        self._count_seconds()
        self._servers[0].alive = True
        self._changed()
        self._start()

    def _changed(self) -> None:
        self._balancer.servers_changed(self._servers, self._now)

    def _count_seconds(self) -> None:
        self._seconds_there += (self._now - self._since) * sum(server.alive for server in self._servers)
        self._since = self._now

    def _expect_end(self, server: Server) -> None:
        expected = server.next_end()
        if expected is None:
            return
        order = self._later(expected[0], lambda: self._ended(server, order))
        self._end_order[server.number] = order

    def _ended(self, server: Server, order: int) -> None:
        if self._end_order.get(server.number) != order:
            return
        number = server.end(self._now)
        self._expect_end(server)
        self._replied(self._rollouts[number])

    def _later(self, at: float, act: Callable[[], None]) -> int:
        order = next(self._order)
        heapq.heappush(self._events, _Event(at, order, act))
        return order
