"""Which waiting rollouts should be hinted to workers now. The order is decided here; workers only follow hints."""

from __future__ import annotations

from collections import Counter
from datetime import datetime, timedelta
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import connection
from django.db.models import Count, Q, QuerySet, Sum
from django.utils import timezone

from rollouts.lifecycle import ACTIVE, Stage, State
from rollouts.models import LLMServer, Rollout, WorkerProcess

# How many waiting rollouts of one project, node or policy are looked at in one round.
_WINDOW = 256


class Hint(NamedTuple):
    """One message to publish."""

    stage: Stage
    node: str  # empty: any node
    rollout_id: UUID

    @property
    def queue(self) -> str:
        return queue_name(self.stage, self.node)


def queue_name(stage: Stage, node: str) -> str:
    """INIT has one shared queue; RUN and EVAL go to the node that holds the sandbox."""
    return f"rollouts.{stage.value}" if stage is Stage.INIT else f"rollouts.{stage.value}.{node}"


def due_hints() -> list[Hint]:
    """Choose and mark what to hint. A hint that nobody took within `HINT_TIMEOUT_SECONDS` becomes due again."""
    now = timezone.now()
    stale = now - timedelta(seconds=settings.HINT_TIMEOUT_SECONDS)
    capacity = _capacity_by_stage_and_node()
    chosen = [
        *_for_evaluation(capacity, now, stale),
        *_for_running(capacity, now, stale),
        *_for_initializing(capacity, now, stale),
    ]
    return [hint for hint in chosen if _mark(hint, now, stale)]


def _mark(hint: Hint, now: datetime, stale: datetime) -> bool:
    waiting = _due(Rollout.objects.filter(id=hint.rollout_id, lease_owner=None), now, stale)
    return bool(waiting.update(hinted_at=now))


def _due(rollouts: QuerySet[Rollout], now: datetime, stale: datetime) -> QuerySet[Rollout]:
    return rollouts.filter(Q(hinted_at=None) | Q(hinted_at__lt=stale), Q(not_before=None) | Q(not_before__lte=now))


def _capacity_by_stage_and_node() -> Counter[tuple[str, str]]:
    live = WorkerProcess.objects.filter(lost_at=None, stopped_at=None)
    return Counter(
        {(r["stage"], r["node"]): r["total"] for r in live.values("stage", "node").annotate(total=Sum("concurrency"))}
    )


def _hinted(state: State, stale: datetime) -> QuerySet[Rollout]:
    """Waiting rollouts whose hint is still on its way."""
    return Rollout.objects.filter(state=state.value, lease_owner=None, hinted_at__gte=stale)


def _for_evaluation(capacity: Counter[tuple[str, str]], now: datetime, stale: datetime) -> list[Hint]:
    """To the rollout's own node while it has an EVAL worker, else to any that has room (the artefacts are stored)."""
    room = Counter({node: slots for (stage, node), slots in capacity.items() if stage == Stage.EVAL.value})
    evaluating = Rollout.objects.filter(state=State.EVALUATING.value)
    room.subtract(Counter(evaluating.filter(lease_owner__isnull=False).values_list("lease_owner__node", flat=True)))
    room.subtract(Counter(_hinted(State.EVALUATING, stale).values_list("node", flat=True)))
    waiting = _due(evaluating.filter(lease_owner=None), now, stale).order_by("-priority", "id")[:_WINDOW]
    hints = []
    for rollout_id, home in waiting.values_list("id", "node"):
        has_worker = (Stage.EVAL.value, home) in capacity
        node = home if has_worker else max(room, key=lambda name: room[name], default="")
        if room[node] > 0:
            room[node] -= 1
            hints.append(Hint(Stage.EVAL, node, rollout_id))
    return hints


def _for_running(capacity: Counter[tuple[str, str]], now: datetime, stale: datetime) -> list[Hint]:
    """As many as the node's RUN workers and the policy's live LLM servers have room for."""
    ready, running = Q(state=State.READY.value), Q(state=State.RUNNING.value)
    on_its_way = Q(ready, hinted_at__gte=stale)
    room = Counter({node: slots for (stage, node), slots in capacity.items() if stage == Stage.RUN.value})
    servers = _server_room()
    taken = Rollout.objects.filter(running | on_its_way).values("node", "run__policy_id").annotate(count=Count("id"))
    for row in taken:
        room[row["node"]] -= row["count"]
        servers[row["run__policy_id"]] -= row["count"]
    waiting = _due(Rollout.objects.filter(ready), now, stale).order_by("-priority", "id")[:_WINDOW]
    hints = []
    for rollout_id, node, policy_id in waiting.values_list("id", "node", "run__policy_id"):
        if room[node] > 0 and servers[policy_id] > 0:
            room[node] -= 1
            servers[policy_id] -= 1
            hints.append(Hint(Stage.RUN, node, rollout_id))
    return hints


def _server_room() -> Counter[UUID]:
    """Capacity of the live LLM servers of each policy."""
    live = LLMServer.objects.filter(state=LLMServer.Health.LIVE)
    return Counter({row["policy_id"]: row["total"] for row in live.values("policy_id").annotate(total=Sum("capacity"))})


def _for_initializing(capacity: Counter[tuple[str, str]], now: datetime, stale: datetime) -> list[Hint]:
    """Up to the INIT workers' room, and never so many that more than `READY_BUFFER` sandboxes would wait for RUN."""
    slots = Counter[str]()
    for (stage, _), concurrency in capacity.items():
        slots[stage] += concurrency
    active = Rollout.objects.filter(state__in=[state.value for state in ACTIVE])
    states = Counter({row["state"]: row["count"] for row in active.values("state").annotate(count=Count("id"))})
    if not slots[Stage.RUN.value]:
        return []  # sandboxes that nobody would use
    started = states[State.INITIALIZING.value] + _hinted(State.QUEUED, stale).count()
    ahead_of_run = started + states[State.READY.value] + states[State.RUNNING.value]
    room = min(slots[Stage.INIT.value] - started, slots[Stage.RUN.value] + settings.READY_BUFFER - ahead_of_run)
    return [Hint(Stage.INIT, "", rollout_id) for rollout_id in _fair_order(stale)[: max(room, 0)]]


# The first rollouts of each project that may start now: of projects, the one with the fewest rollouts in flight is next.
_FAIR = """
SELECT q.id FROM (
    SELECT p.id AS project_id,
           (SELECT count(*) FROM rollouts_rollout r
            WHERE r.project_id = p.id AND r.state IN ('initializing', 'ready', 'running')) AS in_flight
    FROM rollouts_project p
) share
CROSS JOIN LATERAL (
    SELECT r.id, r.priority, row_number() OVER (ORDER BY r.priority DESC, r.id) AS place
    FROM rollouts_rollout r JOIN rollouts_run run ON run.id = r.run_id
    WHERE r.project_id = share.project_id AND r.state = 'queued'
      AND (r.not_before IS NULL OR r.not_before <= now()) AND (r.hinted_at IS NULL OR r.hinted_at < %(stale)s)
      AND EXISTS (SELECT FROM rollouts_llmserver s WHERE s.policy_id = run.policy_id AND s.state = 'live')
    ORDER BY r.priority DESC, r.id LIMIT %(window)s
) q
ORDER BY share.in_flight + q.place, q.priority DESC, q.id LIMIT %(window)s
"""


def _fair_order(stale: datetime) -> list[UUID]:
    with connection.cursor() as cursor:
        cursor.execute(_FAIR, {"stale": stale, "window": _WINDOW})
        return [row[0] for row in cursor.fetchall()]


def unmark(hints: list[Hint]) -> None:
    """The broker did not take these: they are due again at once."""
    Rollout.objects.filter(id__in=[hint.rollout_id for hint in hints], lease_owner=None).update(hinted_at=None)
