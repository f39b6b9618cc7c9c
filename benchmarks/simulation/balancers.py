"""Ours, which asks the platform's own statement in a real database, and what it is compared with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID, uuid4

from django.utils import timezone

from rollouts.lifecycle import Stage, State
from rollouts.models import Dataset, Environment, Group, LLMServer, Policy, Project, Run, Task, WorkerProcess
from rollouts.models import Rollout as Row
from rollouts.run_settings import RunSettings
from rollouts.services.assign import SLACK, choose_servers, move_rollout
from rollouts.worker.fleet_route import BALANCE_SECONDS

from .servers import Server
from .workload import Rollout

_EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
_BATCH = 16  # rollouts of a claim, as the dispatcher makes messages of them
_PROBE_SECONDS = 2.5  # until a server that is back is found to be


class _Simple:
    """What the others have in common: as many rollouts at once as all servers take, and dead servers known as such at once."""

    def __init__(self) -> None:
        self._servers: Sequence[Server] = ()
        self._on: dict[int, Server] = {}

    def servers_changed(self, servers: Sequence[Server], now: float) -> None:
        self._servers = list(servers)

    def start(self, waiting: Sequence[Rollout], now: float) -> dict[int, Server]:
        room = sum(server.capacity for server in self._alive()) - len(self._on)
        started = {rollout.number: self.choose(rollout) for rollout in waiting[: max(0, room)]}
        self._on |= started
        return started

    def server_for(self, rollout: Rollout, now: float) -> Server | None:
        if not self._on[rollout.number].alive:
            self._on[rollout.number] = self.choose(rollout)
        return self._on[rollout.number]

    def ended(self, rollout: Rollout, now: float) -> None:
        del self._on[rollout.number]

    def choose(self, rollout: Rollout) -> Server:
        raise NotImplementedError

    def _alive(self) -> list[Server]:
        return [server for server in self._servers if server.alive]


class RoundRobin(_Simple):
    """Each call to the next server: what an HTTP load balancer does."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = 0

    def choose(self, rollout: Rollout) -> Server:
        self._turn += 1
        alive = self._alive()
        return alive[self._turn % len(alive)]

    def server_for(self, rollout: Rollout, now: float) -> Server | None:
        return self.choose(rollout)


class CumulativeCounter(_Simple):
    """Each rollout to the server that was given the fewest so far, for all its turns: the original system's."""

    def __init__(self) -> None:
        super().__init__()
        self._given: Counter[int] = Counter()

    def choose(self, rollout: Rollout) -> Server:
        server = min(self._alive(), key=lambda server: (self._given[server.number], server.number))
        self._given[server.number] += 1
        return server


class StaticSplit(_Simple):
    """Each rollout to the server that its number says: the trainer's shards. A dead server's go to the next."""

    def choose(self, rollout: Rollout) -> Server:
        alive = self._alive()
        wanted = self._servers[rollout.number % len(self._servers)]
        return wanted if wanted.alive else alive[rollout.number % len(alive)]


class Ours:
    """`rollouts_assign_servers` as claims and routes use it: chosen at the start, anew after a failure, and now and then."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._domain = _Domain()
        self._rows: dict[int, UUID] = {}
        self._groups: dict[int, Group] = {}
        self._known: dict[int, LLMServer] = {}
        self._servers: dict[UUID, Server] = {}
        self._on: dict[int, Server] = {}
        self._ask_at: dict[int, float] = {}
        self._back_at: dict[int, float] = {}

    def servers_changed(self, servers: Sequence[Server], now: float) -> None:
        for server in servers:
            known = self._known.get(server.number)
            if known is None:
                self._add(server, now)
            elif server.alive and known.health == LLMServer.Health.DEAD:
                self._back_at.setdefault(server.number, now + _PROBE_SECONDS)

    def start(self, waiting: Sequence[Rollout], now: float) -> dict[int, Server]:
        self._probe(now)
        started: dict[int, Server] = {}
        for begin in range(0, len(waiting), _BATCH):
            batch = waiting[begin : begin + _BATCH]
            rows = {self._row(rollout): rollout for rollout in batch}
            chosen = choose_servers(list(rows), at=_at(now))
            for row, server in chosen.items():
                Row.objects.filter(id=row).update(state=State.RUNNING.value, llm_server=server, lease_owner=self._domain.worker)
                started[rows[row].number] = self._servers[server]
                self._ask_later(rows[row], now)
            if len(chosen) < len(batch):
                break
        self._on |= started
        return started

    def server_for(self, rollout: Rollout, now: float) -> Server | None:
        self._probe(now)
        mine = self._on[rollout.number]
        if rollout.failed_on:
            self._suspect(rollout.failed_on, now)
            return self._move(rollout, now)
        if now >= self._ask_at[rollout.number]:
            self._ask_later(rollout, now)
            use = Counter(server.number for server in self._on.values())
            used = {s.number: use[s.number] / s.capacity for s in self._servers.values() if self._is_well(s)}
            if used and (use[mine.number] - 1) / mine.capacity - min(used.values()) > SLACK:
                return self._move(rollout, now)
        return mine

    def ended(self, rollout: Rollout, now: float) -> None:
        del self._on[rollout.number]
        Row.objects.filter(id=self._rows[rollout.number]).update(state=State.EVALUATING.value, lease_owner=None)

    def _move(self, rollout: Rollout, now: float) -> Server | None:
        avoid = [self._known[number].id for number in rollout.failed_on]
        chosen = move_rollout(
            rollout_id=self._rows[rollout.number], attempt=1, owner=self._domain.worker.id, avoid=avoid, at=_at(now)
        )
        if chosen is None:
            rollout.failed_on.clear()  # as a route does after the next look
            return None
        self._on[rollout.number] = self._servers[chosen]
        return self._servers[chosen]

    def _ask_later(self, rollout: Rollout, now: float) -> None:
        self._ask_at[rollout.number] = now + self._chance.uniform(*BALANCE_SECONDS)

    def _add(self, server: Server, now: float) -> None:
        # Those of the beginning have been there for long.
        created = _at(now) if now else _at(now) - timedelta(days=1)
        row = self._domain.server(server.number, server.capacity, created)
        self._known[server.number] = row
        self._servers[row.id] = server

    def _is_well(self, server: Server) -> bool:
        return self._known[server.number].health != LLMServer.Health.DEAD

    def _suspect(self, numbers: set[int], now: float) -> None:
        """A failed call keeps rollouts away at once; that the server is dead is found out later and changes nothing here."""
        for number in numbers:
            if self._known[number].health == LLMServer.Health.LIVE and not self._servers[self._known[number].id].alive:
                self._set_health(number, LLMServer.Health.DEAD, now)

    def _probe(self, now: float) -> None:
        for number, at in list(self._back_at.items()):
            if now >= at:
                del self._back_at[number]
                self._set_health(number, LLMServer.Health.RECOVERING, now)

    def _set_health(self, number: int, health: LLMServer.Health, now: float) -> None:
        self._known[number].health = health
        LLMServer.objects.filter(id=self._known[number].id).update(health=health, health_since=_at(now))

    def _row(self, rollout: Rollout) -> UUID:
        if rollout.number not in self._rows:
            if rollout.group not in self._groups:
                self._groups[rollout.group] = self._domain.group()
            self._rows[rollout.number] = self._domain.rollout(self._groups[rollout.group], rollout.number)
        return self._rows[rollout.number]


def _at(now: float) -> datetime:
    return _EPOCH + timedelta(seconds=now)


class _Domain:
    """A project of its own for each simulation; rollouts come into the world READY."""

    def __init__(self) -> None:
        self._project = Project.objects.create(name=f"balancing-{uuid4().hex[:8]}")
        environment = Environment.objects.create(project=self._project, name="sums", handler="arithmetic")
        tasks = Dataset.objects.create(project=self._project, environment=environment, name="sums")
        self._environment = environment
        self._task = Task.objects.create(dataset=tasks, key="one", payload={"a": 1, "b": 2})
        self._policy = Policy.objects.create(project=self._project, name="policy")
        settings = RunSettings.model_validate({}).model_dump(mode="json")
        self._run = Run.objects.create(project=self._project, name="run", policy=self._policy, settings=settings)
        expires = timezone.now() + timedelta(days=365)
        self.worker = WorkerProcess.objects.create(
            node="node", stage=Stage.RUN.value, pid=1, concurrency=1000, lease_expires_at=expires
        )

    def server(self, number: int, capacity: int, created: datetime) -> LLMServer:
        return LLMServer.objects.create(
            project=self._project,
            policy=self._policy,
            url=f"http://server-{number}",
            model="m",
            max_model_len=32_768,
            capacity=capacity,
            created_at=created,
        )

    def group(self) -> Group:
        return Group.objects.create(run=self._run, task=self._task, n=16)

    def rollout(self, group: Group, index: int) -> UUID:
        return Row.objects.create(
            project=self._project,
            run=self._run,
            group=group,
            task=self._task,
            environment=self._environment,
            index=index,
            state=State.READY.value,
            attempt=1,
            node="node",
        ).id
