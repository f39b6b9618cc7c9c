"""The sessions that one gateway process serves: found by their keys, restored from the database, given away when asked for."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID
from weakref import WeakValueDictionary

import structlog
from django.db import InterfaceError, OperationalError

from rollouts.engine.errors import StoreFailed
from rollouts.engine.records import TurnRecord
from rollouts.gateway import AgentSession, SessionClosed
from rollouts.gateway.errors import CallRefused, Kind, SessionMoved
from rollouts.lifecycle import Phase, Stage, State
from rollouts.llm.client import ModelClient
from rollouts.llm.route import OneVersionRoute, Route
from rollouts.llm.types import ModelCallRecord
from rollouts.run_settings import Versions
from rollouts.selectors.trajectory import message_count, stored_calls
from rollouts.services.claim import Claim
from rollouts.services.finish import finish_cancelled
from rollouts.services.lease import Holding
from rollouts.services.progress import TurnWrite, record_turns
from rollouts.services.session_holding import (
    find_session,
    free_sessions,
    hold_session,
    note_calls,
    wanted_sessions,
    why_closed,
)
from rollouts.services.transition import Guard

from .batches import Batch
from .database import Database
from .fleet import FleetView
from .large_values import without_large_outputs

logger = structlog.get_logger(__name__)

_MOVED = "the session moves to another gateway process; send the call again"
# How long a call waits for another gateway process to give its session away, and how often it asks.
_PATIENCE_SECONDS = 20.0
_ASK_SECONDS = 0.2
# So long after its last call began a session is not given away: the call may not have reached it yet.
_SETTLED_SECONDS = 0.5


@dataclass
class _Served:
    """A session in the memory of this process."""

    session: AgentSession
    claim: Claim
    recorder: _Recorder
    has_called: bool = False  # since that was noted
    found_at: float = 0.0
    digests: set[bytes] = field(default_factory=set)


class GatewaySessions:
    """Implements `rollouts.gateway.SessionDirectory`. `owner` gives the process's id, None while it takes nothing."""

    def __init__(
        self, *, database: Database, client: ModelClient, fleet: FleetView, node: str, owner: Callable[[], UUID | None]
    ) -> None:
        self._database = database
        self._client = client
        self._fleet = fleet
        self._node = node
        self._owner = owner
        self._write = Batch(database, record_turns)
        self._served: dict[UUID, _Served] = {}
        self._by_key: dict[bytes, UUID] = {}  # by digest: keys themselves are not kept
        # Of one session at most one memory exists at a time: it is read once the one before has stored all that it will.
        self._locks: WeakValueDictionary[UUID, asyncio.Lock] = WeakValueDictionary()

    async def find(self, key: str) -> AgentSession | None:
        """Of every call: one that is served here already costs no statement."""
        digest = hashlib.sha256(key.encode("utf-8", "replace")).digest()
        rollout_id = self._by_key.get(digest)
        served = self._served.get(rollout_id) if rollout_id else None
        if served is None or served.recorder.spoilt:
            try:
                served = await self._find_stored(key)
            except (OperationalError, InterfaceError) as error:
                logger.warning("session not found: the database does not answer", error=str(error))
                raise CallRefused(Kind.NO_SERVER, "the gateway's database does not answer", retry_after=1) from error
            if served is None:
                return None
            self._by_key[digest] = served.claim.rollout_id
            served.digests.add(digest)
        served.has_called = True
        served.found_at = asyncio.get_running_loop().time()
        return served.session

    def known(self) -> Mapping[UUID, object]:
        """What is served now, for `look_after`."""
        return dict(self._served)

    async def look_after(self, held: Mapping[tuple[UUID, int], Holding], known: Mapping[UUID, object]) -> None:
        """After each renewal of the lease: `held` is what the database says, `known` what was served before it was asked.

        Ends what was cancelled or has ended, gives away what others ask for, and notes who has called.
        """
        owner = self._owner()
        for rollout_id, attempt in [key for key, asked in held.items() if asked.cancel_asked]:
            await self._drop(rollout_id, SessionClosed("the session was cancelled"))
            await self._database.call(_end_cancelled, rollout_id=rollout_id, attempt=attempt, owner=owner)
        present = {rollout_id for rollout_id, _ in held}
        for rollout_id, served in known.items():
            if rollout_id not in present and self._served.get(rollout_id) is served:
                ended = await self._database.call(why_closed, rollout_id=rollout_id)
                await self._drop(rollout_id, SessionClosed(ended) if ended else SessionMoved(_MOVED))
        if owner is None:
            return
        await self._note_calls(owner)
        if present and (wanted := await self._database.call(wanted_sessions, owner=owner)):
            for rollout_id in wanted:
                await self._give_away(rollout_id, owner)

    async def _note_calls(self, owner: UUID) -> None:
        called = {id_: served for id_, served in self._served.items() if served.has_called or not served.session.is_idle}
        if not called:
            return
        for served in called.values():
            served.has_called = False
        try:
            await self._database.call(note_calls, rollout_ids=list(called), owner=owner)
        except (OperationalError, InterfaceError):
            for served in called.values():
                served.has_called = True  # to be noted with the next beat
            raise

    async def drop_all(self) -> None:
        """End all calls and forget all sessions; others may serve them."""
        ids = list(self._served)
        for rollout_id in ids:
            await self._drop(rollout_id, SessionMoved(_MOVED))
        if ids and (owner := self._owner()) is not None:
            await self._database.call(free_sessions, rollout_ids=ids, owner=owner)

    # --- Taking and giving -------------------------------------------------------------------------------------------------

    async def _find_stored(self, key: str) -> _Served | None:
        deadline = asyncio.get_running_loop().time() + _PATIENCE_SECONDS
        while True:
            found = await self._database.call(find_session, key=key)
            if found is None:
                return None
            if found.ended:
                raise SessionClosed(found.ended)
            async with self._lock(found.rollout_id):
                served = await self._take(found.rollout_id)
            if served is not None:
                return served
            if asyncio.get_running_loop().time() > deadline:
                message = "another gateway process serves this session and is busy with other calls of it"
                raise CallRefused(Kind.NO_SERVER, message, retry_after=1)
            await asyncio.sleep(_ASK_SECONDS)

    async def _take(self, rollout_id: UUID) -> _Served | None:
        served = self._served.get(rollout_id)
        if served is not None and not served.recorder.spoilt:
            return served
        await self._forget(rollout_id, SessionMoved(_MOVED))
        if (owner := self._owner()) is None:
            raise SessionMoved(_MOVED)
        held = await self._database.call(_hold, rollout_id, owner, self._node)
        if held is None:
            return None
        if held.claim.server is None:
            await self._database.call(free_sessions, rollout_ids=[rollout_id], owner=owner)
            raise CallRefused(Kind.NO_SERVER, "no LLM server has room for this session", retry_after=5)
        self._served[rollout_id] = served = self._restored(held)
        return served

    def _restored(self, held: _Held) -> _Served:
        settings = held.claim.settings
        recorder = _Recorder(self._database, self._write, held.claim)
        session = AgentSession(
            self._client,
            self._route(held),
            recorder,
            sampling=settings.sampling.to_sampling(),
            call_timeout=settings.timeouts.model_call,
            model=held.policy,
        )
        session.restore(held.calls, next_message=held.next_message)
        return _Served(session, held.claim, recorder)

    def _route(self, held: _Held) -> Route:
        """Where its run wants one version for all of a session, to servers of the version it was first sampled from."""
        assert held.claim.server is not None  # noqa: S101 - else it is not restored
        route = self._fleet.route(held.claim)
        if held.claim.settings.versions is not Versions.STRICT:
            return route
        began_on = held.calls[0].policy_version if held.calls else held.claim.server.policy_version
        return OneVersionRoute(route, began_on)

    def _is_settled(self, rollout_id: UUID) -> bool:
        served = self._served.get(rollout_id)
        if served is None:
            return True
        return served.session.is_idle and asyncio.get_running_loop().time() - served.found_at > _SETTLED_SECONDS

    async def _give_away(self, rollout_id: UUID, owner: UUID) -> None:
        if served := self._served.get(rollout_id):
            self._forget_keys(served)  # it may have another one, and be too busy to be given away
        async with self._lock(rollout_id):
            if self._is_settled(rollout_id):
                await self._forget(rollout_id, SessionMoved(_MOVED))
                await self._database.call(free_sessions, rollout_ids=[rollout_id], owner=owner)

    async def _drop(self, rollout_id: UUID, why: SessionClosed) -> None:
        async with self._lock(rollout_id):
            await self._forget(rollout_id, why)

    async def _forget(self, rollout_id: UUID, why: SessionClosed) -> None:
        """End its calls, and wait for what they still store. Under its lock."""
        served = self._served.pop(rollout_id, None)
        if served is not None:
            self._forget_keys(served)
            await served.session.close(why)

    def _forget_keys(self, served: _Served) -> None:
        """The next call's is looked up."""
        for digest in served.digests:
            self._by_key.pop(digest, None)
        served.digests.clear()

    def _lock(self, rollout_id: UUID) -> asyncio.Lock:
        return self._locks.setdefault(rollout_id, asyncio.Lock())


class _Recorder:
    """Stores the calls of one session under its claim."""

    def __init__(self, database: Database, write: Batch[TurnWrite, bool], claim: Claim) -> None:
        self._database = database
        self._write = write
        self._claim = claim
        self.spoilt = False  # what is in memory may not be what is stored

    async def turn(self, record: TurnRecord) -> None:
        try:
            await self._store(record)
        except BaseException:
            self.spoilt = True
            raise

    async def _store(self, record: TurnRecord) -> None:
        try:
            record = await without_large_outputs(self._database, record)
            stored = await self._write(TurnWrite(self._claim, record))
        except StoreFailed as error:
            raise CallRefused(Kind.NO_SERVER, "the call could not be stored; send it again", retry_after=1) from error
        if not stored:
            ended = await self._database.call(why_closed, rollout_id=self._claim.rollout_id)
            raise SessionClosed(ended) if ended else SessionMoved(_MOVED)


class _Held(NamedTuple):
    """A session in the hands of this process, and what happened in it so far."""

    claim: Claim
    policy: str
    calls: list[ModelCallRecord]
    next_message: int


def _hold(rollout_id: UUID, owner: UUID, node: str) -> _Held | None:
    held = hold_session(rollout_id=rollout_id, owner=owner, node=node)
    if held is None:
        return None
    attempt = held.claim.attempt
    return _Held(*held, stored_calls(rollout_id, attempt), message_count(rollout_id, attempt))


def _end_cancelled(*, rollout_id: UUID, attempt: int, owner: UUID | None) -> None:
    guard = Guard([State.RUNNING], attempt, owner)
    finish_cancelled(ids=[rollout_id], guard=guard, phase=Phase.RUN, stage=Stage.RUN)
