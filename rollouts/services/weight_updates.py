"""Carries announced versions out: calls are kept away, servers load, calls begin again (docs/adr/0019-weight-updates.md).

Everything that has to survive is in the database (`announcements`); this process may be killed at any moment, and whoever leads
the dispatchers next begins the same announcement again. One at a time is at work on a policy: it holds an advisory lock.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar
from uuid import UUID

from django.db import InterfaceError, OperationalError, connection, transaction
from django.db.models import QuerySet

from prorl_site.database import own_connection
from rollouts.llm.capabilities import Feature
from rollouts.llm.engines.control import Control
from rollouts.llm.engines.sources import ExternalSource, LoraSource, PathSource, parse_source
from rollouts.llm.engines.update import Mode, able, load, paused, resume
from rollouts.llm.errors import ModelError
from rollouts.llm.transport import Transport
from rollouts.models import LLMServer, PolicyVersion

from . import announcements
from .announcements import Begun, Target
from .assign import address_of
from .errors import Conflict, FieldError, Refused
from .holds import callers, hold_servers, release_servers
from .overtaken import end_gone

logger = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_LOOK_SECONDS = 0.1  # between two looks at who still calls
_SEEN_SECONDS = 2.0  # in which every process has looked at its servers again
_at_work: set[UUID] = set()  # policies, in this process


def update_weights() -> None:
    """Begin what was announced and is not under way in this process. Returns at once: threads do the work."""
    unfinished = list(PolicyVersion.objects.filter(state__in=announcements.UNFINISHED).values_list("policy_id", "state"))
    waiting = {policy_id for policy_id, state in unfinished if state == PolicyVersion.State.READY}
    if waiting:
        announcements.give_up_silent_trainers()
    for policy_id in {policy_id for policy_id, _ in unfinished} - waiting - _at_work:
        _at_work.add(policy_id)
        threading.Thread(target=_work, args=(policy_id,), name=f"weights of {policy_id}", daemon=True).start()


def _work(policy_id: UUID) -> None:
    try:
        carry_out(policy_id)
    except Exception:
        logger.exception("weight update interrupted; trying again")
    finally:
        _at_work.discard(policy_id)
        connection.close()


def carry_out(policy_id: UUID) -> None:
    """All that is announced for a policy, in order, unless another process is at it."""
    key = int.from_bytes(policy_id.bytes[-8:], "big", signed=True)
    with own_connection() as lines:
        if not lines.execute("SELECT pg_try_advisory_lock(%s)", [key]).fetchone()[0]:  # type: ignore[index]
            return
        while (announcement_id := announcements.next_of(policy_id)) is not None:
            begun = announcements.begin(announcement_id)
            logger.info("weight update begins: version %s, %s", begun.announcement.version, begun.announcement.mode)
            connection.close()  # it takes minutes, and its steps have their own
            asyncio.run(_Update(begun).carry_out())
            end_gone(policy_id)
            lines.execute("SELECT 1")  # fails when the lock was lost with its connection: another process may be at it


class _Update:
    """One announcement, from the first hold to the last release."""

    def __init__(self, begun: Begun) -> None:
        self._announcement = begun.announcement
        self._targets = begun.targets
        self._source = parse_source(begun.announcement.source)
        self._end = time.monotonic() + begun.seconds_left
        self._transport = Transport()

    async def carry_out(self) -> None:
        try:
            if isinstance(self._source, ExternalSource):
                await self._make_ready()
                return
            async with asyncio.TaskGroup() as group:
                for target in self._targets:
                    group.create_task(self._let_go_on(target) if target.is_done else self._update(target, self._source))
            await _in_thread(announcements.finish, self._announcement.pk)
        finally:
            await self._transport.close()

    async def _update(self, target: Target, source: PathSource | LoraSource) -> None:
        begun = time.monotonic()
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._left):
                await self._load(target, source)
        except (ModelError, TimeoutError) as error:
            why = str(error) or "it took longer than the update may (PRORL_WEIGHT_UPDATE_SECONDS)"
            logger.warning("version %s not loaded by %s: %s", self._announcement.version, target.address.url, why)
            await _in_thread(announcements.note_failed, self._announcement, target.id, why, seconds=time.monotonic() - begun)
        await _in_thread(release_servers, [target.id])

    async def _let_go_on(self, target: Target) -> None:
        """It had loaded when the process before this one ended, which may not have come to resume it."""
        try:
            await resume(Control(self._transport, target.address), target.address)
        except ModelError as error:
            logger.warning("%s has loaded and does not go on: %s", target.address.url, error)
            await _in_thread(announcements.note_failed, self._announcement, target.id, str(error))

    async def _load(self, target: Target, source: PathSource | LoraSource) -> None:
        if target.is_asleep:
            raise ModelError("it is asleep; wake it before new weights are announced", retryable=False)
        begun = time.monotonic()
        control = Control(self._transport, target.address)
        mode = able(target.address, self._mode)
        if mode != "continue":
            await self._hold_until_quiet(target, control, mode)
        await _in_thread(announcements.note, self._announcement.pk, target.id, "loading")
        async with paused(control, target.address, mode, timeout=self._left):
            version = self._announcement.version
            kept = mode == "continue"
            try:
                await load(control, target.address, source, version, recompute_running=kept, timeout=self._left)
            except (ModelError, asyncio.CancelledError) as error:
                if kept:
                    await self._keep_calls_away(target, str(error) or "it took too long")
                raise
            seconds = time.monotonic() - begun
            await _in_thread(announcements.note_loaded, self._announcement, target.id, seconds=seconds)

    async def _keep_calls_away(self, target: Target, why: str) -> None:
        """Before a server that was not under a hold goes on with weights that are not known."""
        while True:
            try:
                await _in_thread(announcements.note_failed, self._announcement, target.id, why)
                break
            except (OperationalError, InterfaceError) as error:
                logger.warning("%s stays paused until it is noted that it did not load: %s", target.address.url, error)
                await asyncio.sleep(_SEEN_SECONDS)
        await asyncio.sleep(_SEEN_SECONDS)

    async def _make_ready(self) -> None:
        """Keep calls away, and leave the rest to the trainer. When that does not succeed nothing has changed."""
        awake = [target for target in self._targets if not target.is_asleep]
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self._left), asyncio.TaskGroup() as group:
                for target in awake:
                    mode = able(target.address, self._mode)
                    if mode != "continue":
                        control = Control(self._transport, target.address)
                        group.create_task(self._hold_until_quiet(target, control, mode))
        except (TimeoutError, ExceptionGroup) as error:
            why = str(error.exceptions[0]) if isinstance(error, ExceptionGroup) else "calls did not end in time"
            logger.warning("version %s cannot be loaded: %s", self._announcement.version, why)
            for target in self._targets:
                await _in_thread(announcements.note, self._announcement.pk, target.id, "failed", error=why)
            await _in_thread(announcements.finish, self._announcement.pk)
            return
        for target in self._targets:
            await _in_thread(announcements.note, self._announcement.pk, target.id, "ready")
        await _in_thread(announcements.note_ready, self._announcement.pk)

    async def _hold_until_quiet(self, target: Target, control: Control, mode: Mode) -> None:
        """Wait until no call of ours is in flight. In mode `abort` a server that can is made to end them, again and again:

        a process that has not seen the hold yet may begin one more.
        """
        ends_them = mode == "abort" and Feature.PAUSE in target.address.features
        cut = mode == "abort" and not ends_them
        await _in_thread(hold_servers, [target.id], LLMServer.Hold.CUT if cut else LLMServer.Hold.WAIT)
        while await _in_thread(callers, target.id):
            if ends_them:
                await control.abort_requests()
            await asyncio.sleep(_LOOK_SECONDS)

    @property
    def _mode(self) -> Mode:
        mode: Mode = self._announcement.mode  # type: ignore[assignment]
        return mode

    @property
    def _left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def note_weights_in_place(*, announcement: PolicyVersion, failed: Mapping[UUID, str]) -> PolicyVersion:
    """The trainer has updated the servers of an external announcement; `failed` names those where that went wrong, and why.

    Said again of a version that is live, it changes nothing.
    """
    if announcement.state == PolicyVersion.State.LIVE:
        return announcement
    if announcement.state != PolicyVersion.State.READY:
        raise Conflict(f"Version {announcement.version} is {announcement.state}, not ready; wait until it is.")
    if strangers := set(map(str, failed)) - set(announcement.report):
        errors = [FieldError(f"/failed/{server_id}", "It is not in `report`.") for server_id in sorted(strangers)]
        raise Refused("Some servers have no part in this update.", errors)
    targets = list(_targets(announcement))
    problems = {**asyncio.run(_verify(announcement, [t for t in targets if t.pk not in failed])), **failed}
    with transaction.atomic():
        locked = PolicyVersion.objects.select_for_update().get(pk=announcement.pk)
        if locked.state == PolicyVersion.State.READY:
            for target in targets:
                if target.pk in problems:
                    announcements.note_failed(locked, target.pk, problems[target.pk])
                else:
                    announcements.note_loaded(locked, target.pk, seconds=0.0)
            announcements.finish(locked.pk)
    end_gone(announcement.policy_id)
    announcement.refresh_from_db()
    return announcement


def _targets(announcement: PolicyVersion) -> QuerySet[LLMServer]:
    return LLMServer.objects.filter(pk__in=list(announcement.report)).select_related("policy").order_by("id")


async def _verify(announcement: PolicyVersion, servers: list[LLMServer]) -> dict[UUID, str]:
    """Have the servers forget what the old weights made, and name the new ones; what went wrong, by server."""
    transport = Transport()
    errors: dict[UUID, str] = {}

    async def check(server: LLMServer) -> None:
        address = address_of(server)
        control = Control(transport, address)
        mode: Mode = announcement.mode  # type: ignore[assignment]
        try:
            if able(address, mode) == "continue":
                named = await control.weight_version()
                if named != str(announcement.version):
                    raise ModelError(
                        f"it calls its weights {named!r}; a trainer that updates it while it samples has to name the version "
                        "with the weights (vLLM: weight_version of /finish_weight_update)",
                        retryable=False,
                    )
                return
            if Feature.PAUSE in address.features:
                await control.reset_prefix_cache(recompute_running=False)
                if Feature.PICTURES in address.features:
                    await control.forget_pictures()
            if Feature.WEIGHT_VERSION in address.features:
                await control.label(announcement.version)
        except ModelError as error:
            errors[server.pk] = str(error)

    try:
        async with asyncio.TaskGroup() as group:
            for server in servers:
                group.create_task(check(server))
    finally:
        await transport.close()
    return errors


async def _in_thread(service: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    def unit_of_work() -> R:
        try:
            return service(*args, **kwargs)
        finally:
            connection.close()

    return await asyncio.to_thread(unit_of_work)
