"""Which gateway process serves a session. One at a time does, and every write of it is guarded by that.

A process takes a session with its first call. Another one that gets a call asks for it: the holder gives it away once no call
of it is in flight, and one that has fallen silent is not waited for. So a session outlives its gateway process, and takes no
harm from a load balancer that sends its calls here and there; it only waits a moment each time.
"""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from typing import NamedTuple
from uuid import UUID

from django.conf import settings
from django.db import connection, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from rollouts.lifecycle import Cause, Phase, Stage, State, Termination
from rollouts.models import LLMServer, Rollout, Session
from rollouts.models.session import KEY_PREFIX

from .assign import move_rollout
from .claim import Claim, load_claims
from .keys import digest
from .session_closing import give_up_session
from .sessions import why_ended

_MISSED_BEATS = 3  # after which a holder is not waited for


class FoundSession(NamedTuple):
    """The session of a key. `ended` is why it takes no calls any more, empty while it does."""

    rollout_id: UUID
    ended: str


def find_session(*, key: str) -> FoundSession | None:
    """None when there is no session of this key."""
    prefix, _, rest = key.partition("_")
    key_id, _, token = rest.partition("_")
    if prefix != KEY_PREFIX or not token or not (key.isascii() and key_id.isalnum()):
        return None
    session = Session.objects.select_related("rollout").defer("rollout__artefacts").filter(key_id=key_id).first()
    if session is None or not hmac.compare_digest(session.key_sha256, digest(key)):
        return None
    return FoundSession(session.pk, _why_closed(session.rollout))


def why_closed(*, rollout_id: UUID) -> str:
    """Why a session takes no calls any more; empty while it does."""
    return _why_closed(Rollout.objects.defer("artefacts").get(pk=rollout_id))


def _why_closed(rollout: Rollout) -> str:
    if rollout.state != State.RUNNING.value:
        return f"the session has ended: {why_ended(rollout)}"
    return "the session is being cancelled" if rollout.cancel_requested_at is not None else ""


_TAKE = """
WITH mine AS (
    SELECT r.id FROM rollouts_rollout r
    JOIN rollouts_session s ON s.rollout_id = r.id
    JOIN rollouts_workerprocess holder ON holder.id = r.lease_owner_id
    WHERE r.id = %(session)s AND r.state = 'running' AND r.cancel_requested_at IS NULL
      AND (holder.id = %(me)s OR s.taken_at IS NULL OR holder.lost_at IS NOT NULL OR holder.stopped_at IS NOT NULL
           OR holder.lease_expires_at < now() + make_interval(secs => %(quiet)s))
      AND EXISTS (SELECT FROM rollouts_workerprocess WHERE id = %(me)s AND lost_at IS NULL AND stopped_at IS NULL)
    FOR NO KEY UPDATE OF r, s
), moved AS (
    UPDATE rollouts_rollout r SET lease_owner_id = %(me)s FROM mine WHERE r.id = mine.id AND r.lease_owner_id <> %(me)s
), taken AS (
    UPDATE rollouts_session s SET taken_at = now(), wanted_at = NULL FROM mine WHERE s.rollout_id = mine.id
), asked AS (
    UPDATE rollouts_session SET wanted_at = now()
    WHERE rollout_id = %(session)s AND wanted_at IS NULL AND NOT EXISTS (SELECT FROM mine)
)
SELECT count(*) FROM mine
"""


def take_session(*, rollout_id: UUID, owner: UUID) -> bool:
    """Become the process that serves a session. False while another one does, which has then been asked for it."""
    quiet = settings.LEASE_SECONDS - _MISSED_BEATS * settings.HEARTBEAT_SECONDS
    with connection.cursor() as cursor:
        cursor.execute(_TAKE, {"session": rollout_id, "me": owner, "quiet": max(0.0, quiet)})
        return bool(cursor.fetchone()[0])


class HeldSession(NamedTuple):
    """A session as its gateway process needs it. `claim.server` is None while no LLM server has room for it."""

    claim: Claim
    policy: str


def hold_session(*, rollout_id: UUID, owner: UUID, node: str) -> HeldSession | None:
    """Take a session, and an LLM server for it; None as in `take_session`."""
    if not take_session(rollout_id=rollout_id, owner=owner):
        return None
    rollout = Rollout.objects.select_related("run__policy").defer("artefacts").get(pk=rollout_id)
    server = rollout.llm_server_id
    if server is None or not LLMServer.objects.filter(pk=server).exists():
        move_rollout(rollout_id=rollout_id, attempt=rollout.attempt, owner=owner)
    [claim] = load_claims([rollout_id], owner, Stage.RUN, node)
    return HeldSession(claim, rollout.run.policy.name)


_OF_HOLDER = (
    "FROM rollouts_rollout r WHERE r.id = s.rollout_id AND s.rollout_id = ANY(%(ids)s) AND r.lease_owner_id = %(owner)s"
)
_TOUCH = f"""
UPDATE rollouts_session s SET
    expires_at = now() + make_interval(secs => s.ttl_seconds), last_seen_at = now(), last_call_at = now()
{_OF_HOLDER} AND r.state = 'running'
"""  # noqa: S608 - constants
# A session in nobody's memory keeps no room of an LLM server, and nobody would say that it makes no call there.
_FREE = f"""
WITH freed AS (
    UPDATE rollouts_rollout SET llm_server_id = NULL
    WHERE id = ANY(%(ids)s) AND lease_owner_id = %(owner)s AND state = 'running'
)
UPDATE rollouts_session s SET taken_at = NULL, wanted_at = NULL {_OF_HOLDER}
"""  # noqa: S608
_WANTED = """
SELECT s.rollout_id FROM rollouts_rollout r JOIN rollouts_session s ON s.rollout_id = r.id
WHERE r.lease_owner_id = %s AND s.wanted_at IS NOT NULL
"""


def note_calls(*, rollout_ids: Sequence[UUID], owner: UUID) -> None:
    """The agents of these have called since the last time, or have a call in flight: a sign of life."""
    with connection.cursor() as cursor:
        cursor.execute(_TOUCH, {"ids": list(rollout_ids), "owner": owner})


def wanted_sessions(*, owner: UUID) -> list[UUID]:
    """Those of a process that another one has asked for."""
    with connection.cursor() as cursor:
        cursor.execute(_WANTED, [owner])
        return [row[0] for row in cursor.fetchall()]


def free_sessions(*, rollout_ids: Sequence[UUID], owner: UUID) -> None:
    """Let any process take these: the owner has no call of them in flight and forgets them."""
    with connection.cursor() as cursor:
        cursor.execute(_FREE, {"ids": list(rollout_ids), "owner": owner})


def silent_sessions() -> QuerySet[Rollout]:
    """Those whose agents have shown no sign of life for longer than their time to live."""
    return Rollout.objects.filter(state=State.RUNNING.value, session__expires_at__lt=Now()).defer("artefacts")


def end_if_silent(rollout: Rollout) -> bool:
    """End a session for its agent's silence, unless that has just been broken."""
    with transaction.atomic():
        silent = silent_sessions().select_related("run", "session").filter(pk=rollout.pk)
        current = silent.select_for_update(of=("self",)).first()
        if current is None:
            return False
        detail = f"no call and no heartbeat for {current.session.ttl_seconds} s"
        give_up_session(current, Termination(Phase.RUN, Cause.AGENT_LOST, detail))
    return True
