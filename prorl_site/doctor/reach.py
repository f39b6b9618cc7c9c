"""What rollouts reach out to: model servers, sandboxes, the storage of blobs. Each is tried for real."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from django.conf import settings
from django.core.files.base import ContentFile
from django.core.files.storage import storages

from rollouts.llm.capabilities import Feature
from rollouts.llm.errors import ModelError
from rollouts.llm.probe import probe
from rollouts.models import LLMServer
from sandboxes.errors import SandboxError
from sandboxes.protocol import SandboxSpec
from sandboxes.registry import get_backend

from .report import Finding, fail, ok, warn

_PATIENCE_SECONDS = 10.0


def model_servers() -> Iterator[Finding]:
    """Each is asked for one token, as a rollout would do it."""
    servers = list(LLMServer.objects.filter(admission=LLMServer.Admission.OPEN).select_related("policy"))
    if not servers:
        yield warn("models", "no LLM server is registered, or all are paused", "Register one: POST /api/v1/llm-servers/.")
        return
    yield from asyncio.run(_probe_all(servers))


async def _probe_all(servers: list[LLMServer]) -> list[Finding]:
    return await asyncio.gather(*(_probe(server) for server in servers))


async def _probe(server: LLMServer) -> Finding:
    name = f"{server.model} at {server.url}"
    begun = time.perf_counter()
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            found = await probe(server.url, api_key=server.api_key, model=server.model)
    except TimeoutError:
        reason = f"did not answer within {_PATIENCE_SECONDS:g} s"
    except ModelError as error:
        reason = str(error)
    else:
        if server.model not in found.models:
            return fail("models", f"{name} serves {', '.join(found.models)} now", "Register the server again with its model.")
        exact = {Feature.TOKEN_IDS, Feature.LOGPROBS}
        if exact <= set(server.capabilities.get("features", exact)) and not exact <= found.features:
            return fail("models", f"{name} returns no token ids or no logprobs", "Use vLLM 0.10.2 or newer.")
        return ok("models", f"{name} sampled a token in {(time.perf_counter() - begun) * 1000:.0f} ms")
    return fail("models", f"{name} for policy {server.policy.name}: {reason}", "Start it, or remove it from the policy.")


def sandbox() -> Iterator[Finding]:
    """Start one, talk to it, stop it: what a node of this host's kind does."""
    with tempfile.TemporaryDirectory(prefix="prorl-doctor-") as folder:
        try:
            yield asyncio.run(_try_sandbox(Path(folder)))
        except SandboxError as error:
            yield fail(
                "sandboxes",
                f"{settings.SANDBOX_BACKEND}: {error}",
                f"Run `python -m django sandbox_selfcheck {settings.SANDBOX_BACKEND}`. Not needed on hosts without workers.",
            )


async def _try_sandbox(folder: Path) -> Finding:
    backend = get_backend(settings.SANDBOX_BACKEND, folder, settings.SANDBOX_OPTIONS)
    support = await backend.probe()
    name = f"prorl-doctor-{os.getpid()}"
    begun = time.perf_counter()
    try:
        info = await backend.start(name, SandboxSpec())
        session = await backend.connect(name)
        await session.ping()
        seconds = time.perf_counter() - begun
        await session.close()
    finally:
        await backend.stop(name)
    found = f"{settings.SANDBOX_BACKEND} {support.get('version', '')} ready in {seconds * 1000:.0f} ms, and stopped"
    if missing := sorted(limit for limit, how in info.enforced.items() if how == "none"):
        return warn("sandboxes", f"{found}; not enforced: {', '.join(missing)}", "Delegate cgroup v2 controllers to this user.")
    return ok("sandboxes", found)


def blobs() -> Iterator[Finding]:
    storage = storages["blobs"]
    content = uuid.uuid4().bytes
    try:
        name = storage.save(f"doctor/{uuid.uuid4().hex}", ContentFile(content))
        try:
            with storage.open(name) as file:
                same = file.read() == content
        finally:
            storage.delete(name)
    except OSError as error:
        yield fail(
            "blobs",
            f"the storage of blobs fails: {error}",
            "Rollouts with large outputs are repeated until it works. Free it, or correct PRORL_BLOB_DIR, PRORL_BLOB_BACKEND.",
        )
        return
    if same:
        yield ok("blobs", "one was stored, read and removed")
    else:
        yield fail("blobs", "the storage returns other bytes than were stored", "Check PRORL_BLOB_BACKEND and its options.")
