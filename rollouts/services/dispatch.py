"""Which waiting rollouts are hinted to workers now. The order is decided here; workers only follow hints.

A round costs the same few statements whatever is queued and however much is hinted: the load, the waiting rollouts that might
go (as many as there is room for, each list the head of an index), and one UPDATE that marks the chosen ones.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import connection

from rollouts.lifecycle import STAGES, Stage, State
from rollouts.prepared import execute_prepared
from rollouts.scheduling.load import Load, read_load
from rollouts.scheduling.order import Candidate, WaitingRun, starts

from .transition import DISPATCH_CHANNEL

# So many rollouts of a message are claimed by one statement; more would go to one worker process while others have room.
MESSAGE_SIZE = 16
# How many READY rollouts of a node are looked at: those whose LLM servers are full are passed over.
_WINDOW = 1024


class Hint(NamedTuple):
    """One message: rollouts that a worker of this stage on this node may claim."""

    stage: Stage
    node: str
    rollout_ids: list[UUID]

    @property
    def queue(self) -> str:
        return queue_name(self.stage, self.node)


MAINTENANCE_QUEUE = "maintenance"


def queue_name(stage: Stage, node: str) -> str:
    """Each stage of each node has its own queue: where a rollout starts is decided by the room there, and there it stays."""
    return f"rollouts.{stage.value}.{node}"


class _Choice(NamedTuple):
    stage: Stage
    node: str
    rollout_id: UUID


def due_hints() -> list[Hint]:
    """Choose and mark what to hint."""
    load = read_load()
    processes = {(node.name, stage): node.stages[stage].processes for node in load.nodes.values() for stage in Stage}
    marked = _mark([*_handed_on(load), *_starting(load)])
    return list(_messages(marked, processes))


def _messages(choices: Iterable[_Choice], processes: dict[tuple[str, Stage], int]) -> Iterator[Hint]:
    """Share out a queue's rollouts so that each of its worker processes can get a message."""
    for (stage, node), of_queue in itertools.groupby(sorted(choices, key=itemgetter(0, 1)), key=itemgetter(0, 1)):
        ids = [choice.rollout_id for choice in of_queue]
        share = -(-len(ids) // max(1, processes[node, stage]))
        size = min(share, MESSAGE_SIZE)
        for begin in range(0, len(ids), size):
            yield Hint(stage, node, ids[begin : begin + size])


# --- RUN and EVAL ----------------------------------------------------------------------------------------------------------

_HEADS = """
SELECT place.state, place.node, r.id, run.policy_id
FROM unnest(%(states)s::text[], %(nodes)s::text[], %(limits)s::int[]) WITH ORDINALITY AS place (state, node, n, number)
CROSS JOIN LATERAL (
    SELECT id, run_id, priority FROM rollouts_rollout
    WHERE state = place.state AND node = place.node AND state IN ('ready', 'evaluating')
      AND lease_owner_id IS NULL AND hinted_at IS NULL AND not_before IS NULL
    ORDER BY priority DESC, id LIMIT place.n
) r
JOIN rollouts_run run ON run.id = r.run_id
ORDER BY place.number, r.priority DESC, r.id
"""
# Nothing of the sandbox is needed any more, or it is as good as lost.
_HOMELESS = """
SELECT id FROM rollouts_rollout
WHERE state = 'evaluating' AND node = ANY(%(nodes)s) AND lease_owner_id IS NULL AND hinted_at IS NULL AND not_before IS NULL
  AND (sandbox_name = '' OR state_changed_at < now() - make_interval(secs => %(patience)s))
LIMIT %(room)s
"""


def _handed_on(load: Load) -> list[_Choice]:
    """READY and EVALUATING rollouts, on the node that has their sandbox and within the room of their LLM servers."""
    wanted = []
    homeless = []
    for node in load.nodes.values():
        run, evaluation = node.stages[Stage.RUN], node.stages[Stage.EVAL]
        if run.waiting and run.room:
            wanted.append((STAGES[Stage.RUN].waits_in.value, node.name, _WINDOW))
        if evaluation.waiting and evaluation.room:
            wanted.append((STAGES[Stage.EVAL].waits_in.value, node.name, evaluation.room))
        elif evaluation.waiting and not evaluation.limit:
            homeless.append(node.name)
    if not wanted and not homeless:
        return []
    chosen = []
    room = Counter({(node.name, Stage.RUN): node.stages[Stage.RUN].room for node in load.nodes.values()})
    room |= Counter({(node.name, Stage.EVAL): node.stages[Stage.EVAL].room for node in load.nodes.values()})
    servers = Counter({policy_id: policy.room_to_run for policy_id, policy in load.policies.items()})
    states, nodes, limits = zip(*wanted, strict=True) if wanted else ((), (), ())
    parameters = {"states": list(states), "nodes": list(nodes), "limits": list(limits)}
    for state, name, rollout_id, policy_id in execute_prepared(_HEADS, parameters) if wanted else []:
        stage = Stage.RUN if state == State.READY.value else Stage.EVAL
        if room[name, stage] and (stage is Stage.EVAL or servers[policy_id]):
            room[name, stage] -= 1
            servers[policy_id] -= stage is Stage.RUN
            chosen.append(_Choice(stage, name, rollout_id))
    evaluators = Counter({name: n for (name, stage), n in room.items() if stage is Stage.EVAL})
    return chosen + _adopted(homeless, evaluators) if homeless else chosen


def _adopted(homeless: list[str], room: Counter[str]) -> list[_Choice]:
    """Evaluations whose own node has no EVAL worker, for the nodes with the most room."""
    chosen: list[_Choice] = []
    parameters = {"nodes": homeless, "patience": settings.LEASE_SECONDS, "room": room.total()}
    for (rollout_id,) in execute_prepared(_HOMELESS, parameters):
        node = max(room, key=lambda name: room[name])
        room[node] -= 1
        chosen.append(_Choice(Stage.EVAL, node, rollout_id))
    return chosen


# --- INIT ------------------------------------------------------------------------------------------------------------------

# The runs that have something to start are found by jumping from one to the next in the index; then the head of each is read,
# up to its own limit, and of each policy no more than there is room for.
_QUEUE_HEADS = """
WITH RECURSIVE waiting (run_id) AS (
    (SELECT run_id FROM rollouts_rollout
     WHERE state = 'queued' AND lease_owner_id IS NULL AND hinted_at IS NULL AND not_before IS NULL
     ORDER BY run_id LIMIT 1)
    UNION ALL
    SELECT after.run_id FROM waiting CROSS JOIN LATERAL (
        SELECT run_id FROM rollouts_rollout
        WHERE state = 'queued' AND lease_owner_id IS NULL AND hinted_at IS NULL AND not_before IS NULL
          AND run_id > waiting.run_id
        ORDER BY run_id LIMIT 1
    ) after
)
SELECT * FROM (
    SELECT run.id, run.project_id, run.policy_id, run.max_in_flight, project.max_in_flight, r.id, r.priority,
           row_number() OVER (PARTITION BY run.policy_id ORDER BY r.priority DESC, r.id) AS place
    FROM waiting
    JOIN rollouts_run run ON run.id = waiting.run_id AND run.policy_id = ANY(%(policies)s)
    JOIN rollouts_project project ON project.id = run.project_id
    LEFT JOIN unnest(%(runs)s::uuid[], %(in_flight)s::int[]) AS present (run_id, n) ON present.run_id = run.id
    CROSS JOIN LATERAL (
        SELECT id, priority FROM rollouts_rollout
        WHERE run_id = waiting.run_id AND state = 'queued'
          AND lease_owner_id IS NULL AND hinted_at IS NULL AND not_before IS NULL
        ORDER BY priority DESC, id
        LIMIT GREATEST(0, LEAST(%(room)s, run.max_in_flight - COALESCE(present.n, 0)))
    ) r
) head (run_id, project_id, policy_id, of_run, of_project, id, priority, place)
WHERE place <= %(room)s ORDER BY place
"""


def _starting(load: Load) -> list[_Choice]:
    """Queued rollouts: up to the room of the INIT workers, and never so many that a node's READY buffer would overflow."""
    room = sum(node.room_to_start for node in load.nodes.values())
    policies = [policy_id for policy_id in load.policies if load.policy_room_to_start(policy_id)]
    if not room or not policies:
        return []
    parameters = {
        "policies": policies,
        "room": room,
        "runs": list(load.runs.keys()),
        "in_flight": list(load.runs.values()),
    }
    runs: dict[UUID, WaitingRun] = {}
    for run_id, project_id, policy_id, of_run, of_project, id_, priority, _ in execute_prepared(_QUEUE_HEADS, parameters):
        run = runs.setdefault(run_id, WaitingRun(run_id, project_id, policy_id, of_run, of_project))
        run.candidates.append(Candidate(id_, priority))
    return [_Choice(Stage.INIT, node, rollout_id) for rollout_id, node in starts(load, list(runs.values()))]


# --- Marking ---------------------------------------------------------------------------------------------------------------

# Rows that somebody has locked are passed over: they are just being moved, and whoever waits for one of them while it holds
# others can deadlock with a cancel.
_MARK = """
UPDATE rollouts_rollout r SET hinted_at = now(), node = free.node FROM (
    SELECT chosen.id, chosen.node
    FROM unnest(%(ids)s::uuid[], %(states)s::text[], %(nodes)s::text[]) AS chosen (id, state, node)
    JOIN rollouts_rollout r ON r.id = chosen.id
    WHERE r.state = chosen.state AND r.lease_owner_id IS NULL AND r.hinted_at IS NULL AND r.not_before IS NULL
    FOR NO KEY UPDATE OF r SKIP LOCKED
) free WHERE r.id = free.id RETURNING r.id
"""


def _mark(choices: list[_Choice]) -> list[_Choice]:
    """Those that are still waiting. They count as taken from now on."""
    if not choices:
        return []
    parameters = {
        "ids": [choice.rollout_id for choice in choices],
        "states": [STAGES[choice.stage].waits_in.value for choice in choices],
        "nodes": [choice.node for choice in choices],
    }
    marked = {id_ for (id_,) in execute_prepared(_MARK, parameters)}
    return [choice for choice in choices if choice.rollout_id in marked]


_UNMARK = """
UPDATE rollouts_rollout SET hinted_at = NULL, node = CASE WHEN state = 'queued' THEN '' ELSE node END
WHERE id IN (SELECT id FROM rollouts_rollout WHERE {condition} AND lease_owner_id IS NULL FOR NO KEY UPDATE SKIP LOCKED)
"""
_TAKE_BACK = _UNMARK.format(condition="hinted_at IS NOT NULL AND id = ANY(%s)")
_END_WAITS = f"""
WITH forgotten AS (
    {_UNMARK.format(condition="hinted_at < now() - make_interval(secs => %s)")} RETURNING id
), waited_out AS (
    UPDATE rollouts_rollout SET not_before = NULL WHERE id IN (
        SELECT id FROM rollouts_rollout WHERE not_before <= now() AND finished_at IS NULL FOR NO KEY UPDATE SKIP LOCKED
    ) RETURNING id
)
SELECT pg_notify(%s, '') WHERE EXISTS (SELECT FROM forgotten) OR EXISTS (SELECT FROM waited_out)
"""  # noqa: S608 - constants


def unmark(hints: Iterable[Hint]) -> None:
    """The broker did not take these: they are due again at once."""
    with connection.cursor() as cursor:
        cursor.execute(_TAKE_BACK, [[rollout_id for hint in hints for rollout_id in hint.rollout_ids]])


def end_waits() -> None:
    """What was hinted but taken by nobody within `HINT_TIMEOUT_SECONDS` is due again, and what has waited out its backoff."""
    with connection.cursor() as cursor:
        cursor.execute(_END_WAITS, [settings.HINT_TIMEOUT_SECONDS, DISPATCH_CHANNEL])
