"""Keeping calls away from LLM servers while their weights change: who asks for it, and how it is known that nobody calls.

No rollout is given to a server under a hold, and worker processes begin no call there. So a server is quiet as soon as each
process that has rollouts of its policy has said so. Those whose rollouts are on other servers are asked, too: an agent that
makes several calls at once may have moved on while one of them is still in flight where it was.
"""

from __future__ import annotations

from collections.abc import Collection
from uuid import UUID

from django.db import connection, transaction

from rollouts.models import LLMServer, WorkerProcess

_FORGET = """
UPDATE rollouts_workerprocess SET quiet_servers = ARRAY(SELECT unnest(quiet_servers) EXCEPT SELECT unnest(%(servers)s))
WHERE quiet_servers && %(servers)s
"""
_LOUD = """
SELECT DISTINCT w.id FROM rollouts_llmserver held
JOIN rollouts_llmserver s ON s.policy_id = held.policy_id
JOIN rollouts_rollout r ON r.llm_server_id = s.id AND r.state = 'running'
JOIN rollouts_workerprocess w ON w.id = r.lease_owner_id
WHERE held.id = %(server)s AND NOT %(server)s = ANY(w.quiet_servers) AND w.stopped_at IS NULL AND w.lost_at IS NULL
"""


def hold_servers(servers: Collection[UUID], hold: LLMServer.Hold) -> None:
    """Let no call begin on these servers, and with `CUT` end those in flight.

    What processes said of an earlier hold is forgotten with it: they may have made calls since.
    """
    with transaction.atomic():
        _set(servers, hold)
        with connection.cursor() as cursor:
            cursor.execute(_FORGET, {"servers": list(servers)})


def release_servers(servers: Collection[UUID]) -> None:
    """Let calls begin again."""
    _set(servers, LLMServer.Hold.NONE)


def _set(servers: Collection[UUID], hold: LLMServer.Hold) -> None:
    """In the order in which rollouts are given to servers, which locks them, too."""
    with transaction.atomic():
        ids = [s.id for s in LLMServer.objects.filter(id__in=servers).order_by("id").select_for_update(no_key=True)]
        LLMServer.objects.filter(id__in=ids).update(hold=hold)


def callers(server: UUID) -> set[UUID]:
    """The processes that may have a call in flight on a server under a hold; empty: it is quiet."""
    with connection.cursor() as cursor:
        cursor.execute(_LOUD, {"server": server})
        return {worker for (worker,) in cursor.fetchall()}


def note_quiet(*, worker_id: UUID, servers: Collection[UUID]) -> None:
    """A process has no call in flight on these servers under a hold, and begins none before it has seen the hold released."""
    quiet = sorted(servers)
    WorkerProcess.objects.filter(id=worker_id).exclude(quiet_servers=quiet).update(quiet_servers=quiet)
