"""LLM servers: registered after a probe, watched afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from uuid import UUID

import aiohttp
from django.conf import settings
from django.db import IntegrityError, transaction
from django.db.models import F
from django.utils import timezone

from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ModelError
from rollouts.llm.types import Capabilities
from rollouts.models import LLMServer, Project

from .errors import Conflict, FieldError, Refused, Unavailable
from .registry import get_or_create_policy


def register_server(
    *,
    project: Project,
    url: str,
    policy: str,
    model: str = "",
    policy_version: int = 0,
    capacity: int = 64,
    api_key: str = "",
) -> LLMServer:
    """Probe a server and add it to a policy. It must take and return token ids, with logprobs: training needs them."""
    url = url.rstrip("/")
    if capacity < 1:
        raise Refused.field("/capacity", "Must be at least 1.")
    found = asyncio.run(_probe(url, api_key))
    model = model or (found.models[0] if len(found.models) == 1 else "")
    if model not in found.models:
        raise Refused.field("/model", f"The server serves {', '.join(found.models) or 'nothing'}; name one of these.")
    missing = [
        what
        for what, there in (
            ("token ids", found.returns_token_ids),
            ("logprobs", found.returns_logprobs),
            ("/tokenize", found.tokenize),
        )
        if not there
    ]
    if missing:
        raise Refused.field("/url", f"The server does not offer {', '.join(missing)}, which token-exact rollouts need.")
    if found.max_model_len is None:
        raise Refused.field("/url", "The server's /v1/models does not tell its max_model_len.")
    try:
        with transaction.atomic():
            return LLMServer.objects.create(
                project=project,
                policy=get_or_create_policy(project=project, name=policy),
                policy_version=policy_version,
                url=url,
                model=model,
                api_key=api_key,
                capacity=capacity,
                max_model_len=found.max_model_len,
                capabilities={"version": found.version, "models": list(found.models)},
                last_probe_at=timezone.now(),
            )
    except IntegrityError:
        taken = FieldError("/url", "Change the registered one, or remove it first.")
        raise Conflict(f"{model} at {url} is registered already.", [taken]) from None


async def _probe(url: str, api_key: str) -> Capabilities:
    client = ModelClient()
    try:
        return await client.probe(url, api_key=api_key)
    except ModelError as error:
        raise Unavailable(f"{url} did not answer as an LLM server: {error}", [FieldError("/url", str(error))]) from error
    finally:
        await client.close()


def set_server_state(*, server: LLMServer, state: str) -> None:
    """Pause a server (its running rollouts finish, it gets no new ones) or let it take part again."""
    if state not in ("live", "paused"):
        raise Refused.field("/state", "Use live or paused; whether a server is dead is found by probing.")
    admission = LLMServer.Admission.PAUSED if state == "paused" else LLMServer.Admission.OPEN
    LLMServer.objects.filter(id=server.id).update(admission=admission)


def remove_server(*, server: LLMServer) -> None:
    """Forget a server. Rollouts in their RUN keep the address they started with; stored model calls keep its id."""
    server.delete()


def note_failed_calls(failures: Mapping[UUID, str]) -> None:
    """Workers' calls have failed: server -> how. The servers get nothing new until a probe finds them well."""
    for server_id, error in failures.items():
        LLMServer.objects.filter(id=server_id, health=LLMServer.Health.LIVE).update(
            health=LLMServer.Health.SUSPECT, health_since=timezone.now(), failures=F("failures") + 1, last_error=error[:300]
        )


def probe_servers() -> None:
    """One round of health checks: a server that does not answer gets no rollouts until it does again."""
    watched = LLMServer.objects.filter(admission=LLMServer.Admission.OPEN)
    targets = [(server.id, server.url) for server in watched]
    if targets:
        for server_id, error in asyncio.run(_check_health(targets)):
            health = LLMServer.Health.DEAD if error else LLMServer.Health.LIVE
            LLMServer.objects.filter(id=server_id, admission=LLMServer.Admission.OPEN).update(
                health=health, last_error=error[:300], last_probe_at=timezone.now()
            )


async def _check_health(targets: list[tuple[UUID, str]]) -> list[tuple[UUID, str]]:
    timeout = aiohttp.ClientTimeout(total=max(settings.PROBE_SECONDS, 1.0))
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def check(server_id: UUID, url: str) -> tuple[UUID, str]:
            try:
                async with session.get(f"{url}/health") as response:
                    return server_id, "" if response.status == 200 else f"/health answered {response.status}"
            except (aiohttp.ClientError, TimeoutError) as error:
                return server_id, f"/health did not answer: {type(error).__name__}"

        return await asyncio.gather(*(check(server_id, url) for server_id, url in targets))
