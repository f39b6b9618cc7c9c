"""What nodes, LLM servers, runs and projects have in hand, against what they may have: three statements, whatever is queued."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from uuid import UUID

from django.conf import settings

from rollouts.lifecycle import STAGES, Stage
from rollouts.models import Draining
from rollouts.prepared import execute_prepared


@dataclass
class StageLoad:
    """One stage of one node, in rollouts."""

    slots: int = 0  # what its live worker processes take at once
    processes: int = 0
    cap: int | None = None  # the node's own limit
    open: bool = True  # False while the node drains, and for INIT where no sandbox can be started
    held: int = 0
    hinted: int = 0
    waiting: int = 0  # handed on by the stage before, could start now

    @property
    def limit(self) -> int:
        """Rollouts that may be held at once."""
        if not self.open:
            return 0
        return self.slots if self.cap is None else min(self.slots, self.cap)

    @property
    def room(self) -> int:
        """How many more may be hinted."""
        return max(0, self.limit - self.held - self.hinted)


def _stages() -> dict[Stage, StageLoad]:
    return {stage: StageLoad() for stage in Stage}


@dataclass
class NodeLoad:
    """One node that has live workers, or rollouts."""

    name: str
    ready_buffer: int = 0
    draining: Draining = Draining.NO
    stages: dict[Stage, StageLoad] = field(default_factory=_stages)

    @property
    def ahead(self) -> int:
        """Rollouts that are in RUN or will want its slots next."""
        init, run = self.stages[Stage.INIT], self.stages[Stage.RUN]
        return init.held + init.hinted + run.held + run.hinted + run.waiting

    @property
    def buffer_room(self) -> int:
        """How many more may start before its READY buffer is full."""
        run = self.stages[Stage.RUN].limit
        return max(0, run + self.ready_buffer - self.ahead) if run else 0

    @property
    def room_to_start(self) -> int:
        """How many more INIT rollouts it may be asked to take."""
        return min(self.stages[Stage.INIT].room, self.buffer_room)


@dataclass
class PolicyLoad:
    """One policy's LLM servers, in rollouts."""

    capacity: int = 0  # of the servers that are given rollouts now
    running: int = 0  # in RUN, or on their way to it
    ahead: int = 0  # these, and those that will want a server next

    @property
    def room_to_run(self) -> int:
        return max(0, self.capacity - self.running)


@dataclass
class Load:
    """Everything there is room for, and everything that takes it."""

    nodes: dict[str, NodeLoad] = field(default_factory=dict)
    policies: dict[UUID, PolicyLoad] = field(default_factory=dict)
    runs: Counter[UUID] = field(default_factory=Counter)  # started and not finished
    projects: Counter[UUID] = field(default_factory=Counter)

    def node(self, name: str) -> NodeLoad:
        return self.nodes.setdefault(name, NodeLoad(name))

    def policy(self, policy_id: UUID) -> PolicyLoad:
        return self.policies.setdefault(policy_id, PolicyLoad())

    @property
    def ready_buffer(self) -> int:
        return sum(node.ready_buffer for node in self.nodes.values() if node.stages[Stage.RUN].limit)

    def policy_room_to_start(self, policy_id: UUID) -> int:
        """How many more may start for a policy before its servers' queue would fill the READY buffer."""
        policy = self.policies.get(policy_id)
        return max(0, policy.capacity + self.ready_buffer - policy.ahead) if policy and policy.capacity else 0


_WORKERS = """
SELECT w.node, w.stage,
       COALESCE(sum(w.concurrency) FILTER (WHERE w.draining_since IS NULL), 0),
       count(*) FILTER (WHERE w.draining_since IS NULL),
       n.max_init, n.max_run, n.max_eval, n.ready_buffer, n.drain_deadline IS NOT NULL, n.drain_deadline <= now(),
       n.sandbox_problem <> ''
FROM rollouts_workerprocess w LEFT JOIN rollouts_node n ON n.name = w.node
WHERE w.stopped_at IS NULL AND w.lost_at IS NULL AND w.lease_expires_at > now() AND w.stage <> 'gateway'
GROUP BY w.node, w.stage, n.name
"""

_SERVERS = "SELECT policy_id, sum(room) FROM rollouts_usable_servers(now(), %(slow_start)s) GROUP BY policy_id"

# Sessions take room of LLM servers, runs and projects, but of no node: their agents run elsewhere.
# Of queued rollouts only those with a hint on its way: however many are queued, these are few and have an index.
_IN_HAND = """
SELECT mine.state, mine.node, mine.situation, run.id, run.project_id, run.policy_id, mine.n FROM (
    SELECT r.state, COALESCE(w.node, r.node) AS node, r.run_id,
           CASE WHEN w.stage = 'gateway' THEN 'session' WHEN r.lease_owner_id IS NOT NULL THEN 'held'
                WHEN r.hinted_at IS NOT NULL THEN 'hinted'
                WHEN r.not_before IS NOT NULL THEN 'delayed' ELSE 'waiting' END AS situation, count(*) AS n
    FROM rollouts_rollout r LEFT JOIN rollouts_workerprocess w ON w.id = r.lease_owner_id
    WHERE r.state IN ('initializing', 'ready', 'running', 'evaluating')
    GROUP BY 1, 2, 3, 4
    UNION ALL
    SELECT r.state, r.node, r.run_id, 'hinted', count(*)
    FROM rollouts_rollout r WHERE r.hinted_at IS NOT NULL AND r.state = 'queued'
    GROUP BY 1, 2, 3, 4
) mine JOIN rollouts_run run ON run.id = mine.run_id
"""

_STAGE_OF = {rule.holds_in.value: stage for stage, rule in STAGES.items()} | {
    rule.waits_in.value: stage for stage, rule in STAGES.items()
}


def read_load() -> Load:
    """The present load."""
    load = Load()
    for name, stage, slots, processes, max_init, max_run, max_eval, ready_buffer, drains, over, broken in execute_prepared(
        _WORKERS
    ):
        node = load.node(name)
        node.ready_buffer = settings.READY_BUFFER if ready_buffer is None else ready_buffer
        node.draining = Draining.OVER if over else Draining.FINISHING if drains else Draining.NO
        node.stages[Stage(stage)].slots = slots
        node.stages[Stage(stage)].processes = processes
        for limited, cap in zip(Stage, (max_init, max_run, max_eval), strict=True):
            node.stages[limited].cap = cap
            # What a draining node has run is still evaluated there: its sandbox may be needed.
            finishing = limited is Stage.EVAL and node.draining is Draining.FINISHING
            node.stages[limited].open = finishing or node.draining is Draining.NO
        if broken:
            node.stages[Stage.INIT].open = False
    for policy_id, capacity in execute_prepared(_SERVERS, {"slow_start": settings.SLOW_START_SECONDS}):
        load.policy(policy_id).capacity = capacity
    for state, name, situation, run_id, project_id, policy_id, n in execute_prepared(_IN_HAND):
        load.runs[run_id] += n
        load.projects[project_id] += n
        stage = _STAGE_OF[state]
        _count(load.node(name).stages[stage], situation, n)
        if stage is not Stage.EVAL:
            policy = load.policy(policy_id)
            policy.ahead += n
            policy.running += n if stage is Stage.RUN and situation != "waiting" else 0
    return load


def _count(stage: StageLoad, situation: str, n: int) -> None:
    if situation == "held":
        stage.held += n
    elif situation == "hinted":
        stage.hinted += n
    elif situation == "waiting":
        stage.waiting += n
