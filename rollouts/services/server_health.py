"""Watching LLM servers: probes of the dispatcher's, and calls of workers that failed. The rules are in `scheduling.health`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

import aiohttp
from django.conf import settings
from django.db import connection
from django.db.models import Q
from django.utils import timezone

from rollouts.llm.capabilities import Capabilities, Feature
from rollouts.llm.client import ModelClient
from rollouts.llm.engines.control import Control
from rollouts.llm.errors import ModelError
from rollouts.llm.probe import probe, samples_a_token
from rollouts.llm.server_metrics import read_load
from rollouts.llm.transport import Transport, why_unreachable
from rollouts.llm.types import ServerAddress
from rollouts.models import LLMServer, PolicyVersion
from rollouts.scheduling.health import Condition, Sight, after

from .assign import address_of
from .transition import DISPATCH_CHANNEL

UNDER_WAY = (PolicyVersion.State.LOADING, PolicyVersion.State.READY)
_UNTOLD = "default"  # what vLLM calls weights that it was told no name of
_ENDED = ("live", "failed")  # an update on one server
_SUSPECT_SECONDS = 1.0  # between probes of a server that has just failed
_SAMPLE_SECONDS = 10.0  # for one token


class _Finding(NamedTuple):
    error: str  # empty: it is well
    noted: dict[str, Any]  # columns


def probe_due(*, live: bool) -> None:
    """Probe the servers whose turn it is; those that are paused, asleep or given new weights are left in peace.

    The `live` ones apart from the others, which may take long to answer or never do.
    """
    watched = LLMServer.objects.filter(
        admission__in=(LLMServer.Admission.OPEN, LLMServer.Admission.DRAINING), hold=LLMServer.Hold.NONE
    )
    watched = (watched.filter if live else watched.exclude)(health=LLMServer.Health.LIVE).exclude(id__in=_being_updated())
    now = timezone.now()
    due = Q(last_probe_at=None) | Q(last_probe_at__lte=now - timedelta(seconds=settings.PROBE_SECONDS))
    soon = now - timedelta(seconds=min(_SUSPECT_SECONDS, settings.PROBE_SECONDS))
    due |= Q(health=LLMServer.Health.SUSPECT, last_probe_at__lte=soon)
    probe_servers(list(watched.filter(due).select_related("policy")))


def _being_updated() -> list[UUID]:
    """In mode `continue` there is no hold, and a server has the new weights a moment before it is noted."""
    reports = PolicyVersion.objects.filter(state__in=UNDER_WAY).values_list("report", flat=True)
    return [UUID(id_) for report in reports for id_, entry in report.items() if entry["state"] not in _ENDED]


def probe_servers(servers: Sequence[LLMServer]) -> None:
    """Look at these servers now and note what was found."""
    if not servers:
        return
    addresses = [address_of(server) for server in servers]  # asks the database, which the loop may not
    updated = PolicyVersion.objects.filter(policy_id__in={server.policy_id for server in servers})
    findings = asyncio.run(_look_at_all(servers, addresses, set(updated.values_list("policy_id", flat=True))))
    for server, finding in zip(servers, findings, strict=True):
        sight = Sight.FAILED_PROBE if finding.error else Sight.WELL
        noted = {"last_error": finding.error[:300], "last_probe_at": timezone.now()}
        _note(server, sight, noted | finding.noted)


def note_failed_calls(failures: Mapping[UUID, str]) -> None:
    """Workers' calls have failed: server -> how. The servers get nothing new until a probe finds them well."""
    trusted = LLMServer.objects.filter(id__in=failures, health__in=(LLMServer.Health.LIVE, LLMServer.Health.RECOVERING))
    for server in trusted:
        _note(server, Sight.FAILED_CALL, {"last_error": failures[server.id][:300]})


def _note(server: LLMServer, sight: Sight, noted: dict[str, Any]) -> None:
    """Nothing, when its health has changed since it was read."""
    now = timezone.now()
    seconds = (now - server.health_since).total_seconds()
    then = after(Condition(server.health, server.failures, seconds), sight, slow_start=settings.SLOW_START_SECONDS)
    noted |= {"health": then.health, "failures": then.failures}
    if then.health != server.health:
        noted["health_since"] = now
    changed = LLMServer.objects.filter(id=server.id, health=server.health).update(**noted)
    if changed and then.health != server.health:
        wake_dispatcher()


def wake_dispatcher() -> None:
    """Servers that rollouts wait for may take them now."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_notify(%s, '')", [DISPATCH_CHANNEL])


async def _look_at_all(
    servers: Sequence[LLMServer], addresses: Sequence[ServerAddress], updated: Collection[UUID]
) -> list[_Finding]:
    """`updated` are the policies for which new weights were ever announced."""
    client = ModelClient()
    timeout = aiohttp.ClientTimeout(total=max(settings.PROBE_SECONDS, 1.0))
    try:
        async with aiohttp.ClientSession(timeout=timeout) as session:
            pairs = zip(servers, addresses, strict=True)
            looks = (_look_at(s, address, session, client, was_updated=s.policy_id in updated) for s, address in pairs)
            return await asyncio.gather(*looks)
    finally:
        await client.close()


async def _look_at(
    server: LLMServer, address: ServerAddress, session: aiohttp.ClientSession, client: ModelClient, *, was_updated: bool
) -> _Finding:
    plain = server.engine == LLMServer.Engine.OPENAI  # it has no health endpoint of its own, and may take no ids
    path = "/v1/models" if plain else "/health"
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    try:
        async with session.get(server.url + path, headers=headers, allow_redirects=False) as response:
            if response.status != 200:
                return _Finding(f"{path} answered {response.status}", {})
    except (aiohttp.ClientError, TimeoutError) as error:
        return _Finding(f"{path} did not answer: {why_unreachable(error)}", {})
    if Feature.WEIGHT_VERSION in address.features:
        problem = await _other_weights(server, address, session, headers, was_updated=was_updated)
        if problem:
            return _Finding(problem, {})
    if server.health != LLMServer.Health.LIVE and not plain:
        try:
            await samples_a_token(client, address, timeout=_SAMPLE_SECONDS)
        except ModelError as error:
            return _Finding(f"sampled no token: {error}", {})
    noted: dict[str, Any] = {}
    if "features" not in server.capabilities:
        try:
            noted = found_columns(await _first_look(server, address))
        except ModelError as error:
            return _Finding(f"what it can do is not known: {error}", {})
    if load := {} if plain else await _load_of(server, session):
        noted["load"] = load
    return _Finding("", noted)


async def _first_look(server: LLMServer, address: ServerAddress) -> Capabilities:
    """At one that was registered before servers were asked what they can do; until then it is given nothing."""
    found = await probe(server.url, api_key=server.api_key, model=server.model, tokenizer=server.tokenizer)
    if Feature.WEIGHT_VERSION in found.features:
        await _label(address)
    return found


async def _label(address: ServerAddress) -> None:
    """Have the server call its weights what they are here."""
    transport = Transport()
    try:
        await Control(transport, address).label(address.policy_version)
    finally:
        await transport.close()


def found_columns(found: Capabilities) -> dict[str, Any]:
    """What a probe has found, as a server's row keeps it."""
    capabilities = {
        "version": found.version,
        "models": list(found.models),
        "features": sorted(found.features),
        "weight_version": found.weight_version,
        "picture_id": found.picture_id,
    }
    return {"engine": found.engine, "capabilities": capabilities}


async def _other_weights(
    server: LLMServer,
    address: ServerAddress,
    session: aiohttp.ClientSession,
    headers: Mapping[str, str],
    *,
    was_updated: bool,
) -> str:
    """What is wrong with the weights that it says it has; empty when it has those that it was told to have.

    One that was restarted has those that it starts with: the same, where it was never given others.
    """
    try:
        async with session.get(f"{server.url}/weight_info", headers=headers, allow_redirects=False) as response:
            named = (await response.json()).get("weight_version")
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError) as error:
        return f"/weight_info did not answer: {why_unreachable(error)}"
    if named == str(server.policy_version):
        return ""
    if named == _UNTOLD and not was_updated:
        try:
            await _label(address)
        except ModelError as error:
            return f"it was restarted, and not told its version: {error}"
        return ""
    what = f"it calls its weights {named!r} and not {server.policy_version}"
    return f"{what}: it was restarted, or others were loaded. Announce a version, or set its policy_version."


async def _load_of(server: LLMServer, session: aiohttp.ClientSession) -> dict[str, Any]:
    """Empty when it has no metrics: that is nothing against its health."""
    try:
        async with session.get(f"{server.url}/metrics", allow_redirects=False) as response:
            if response.status != 200:
                return {}
            return read_load(await response.text(), at=time.time(), before=server.load)
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
