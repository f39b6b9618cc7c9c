"""One build of an image, from the claim to the guarded write that ends it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import structlog
from django.conf import settings
from django.db import InterfaceError, OperationalError

from sandboxes.errors import BackendUnavailable, LimitExceeded, SandboxError
from sandboxes.images.build import build_image, input_key
from sandboxes.images.errors import BadSource, BuildFailed, ImageRefused
from sandboxes.images.log import BuildLog
from sandboxes.images.services.builds import (
    TAIL_CHARACTERS,
    Answer,
    BuildClaim,
    Report,
    digest_built_from,
    end_cancelled_build,
    fail_build,
    finish_build,
    give_back_build,
    report_build,
)
from sandboxes.images.sources import parse_settings
from sandboxes.images.store import Entry, Store
from sandboxes.protocol import Backend
from sandboxes.registry import get_backend

from .database import Database

logger = structlog.get_logger(__name__)

# Apart from the sandboxes of rollouts, whose janitor stops whatever it does not know. A leading dot hides it there.
_FOLDER = ".builds"


def builds_backend() -> Backend:
    """Starts the sandboxes that images are built in, which reach the network: packages come from there."""
    options = replace(settings.SANDBOX_OPTIONS, full_network=True)
    return get_backend(settings.SANDBOX_BACKEND, Path(settings.SANDBOX_DIR) / _FOLDER, options)


class ImageBuilder:
    """Carries out builds; one per process."""

    def __init__(self, *, database: Database, store: Store, backend: Backend) -> None:
        self._database = database
        self._store = store
        self._backend = backend

    async def carry_out(self, claim: BuildClaim) -> None:
        """Everything that can go wrong in a build ends here, once, as data. When this is cancelled, the build is given back."""
        with BuildLog(self._store.log_path(claim.image, claim.number), TAIL_CHARACTERS) as log:
            work = asyncio.create_task(self._make(claim, log))
            heart = asyncio.create_task(self._beat(claim, log, work))
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                work.cancel()
                await asyncio.wait({work})
                log.line("the worker stops; the build begins anew elsewhere")
                await self._database.insist(give_back_build, claim=claim, report=_report(log))
                raise
            finally:
                heart.cancel()
            await self._end(claim, log, work)

    async def _end(self, claim: BuildClaim, log: BuildLog, work: asyncio.Task[tuple[Entry, str]]) -> None:
        if work.cancelled():
            log.line("cancelled")
            await self._database.insist(end_cancelled_build, claim=claim, report=_report(log))
            return
        error = work.exception()
        if error is None:
            entry, key = work.result()
            log.line(f"ready: {entry.digest}, {entry.size / (1 << 20):.0f} MiB")
            log.progress(1.0, "")
            await self._database.insist(finish_build, claim=claim, entry=entry, key=key, report=_report(log))
            return
        match error:
            case BuildFailed():
                retryable = error.retryable
            case SandboxError():
                retryable = not isinstance(error, LimitExceeded | BackendUnavailable)
            case _:
                retryable = False
                logger.error("an image's build failed", image=claim.image, build=claim.build_id, exc_info=error)
        text = str(error) if isinstance(error, BuildFailed | SandboxError) else f"{type(error).__name__}: {error}"
        log.line(f"failed: {text.partition(chr(10))[0].rstrip(':')}")  # the rest, what a program printed, stands there already
        await self._database.insist(fail_build, claim=claim, error=text, retryable=retryable, report=_report(log))

    async def _make(self, claim: BuildClaim, log: BuildLog) -> tuple[Entry, str]:
        log.line(f"building {claim.image} from {claim.kind} on {settings.NODE}")
        try:
            source = parse_settings(claim.kind, claim.source)
        except ImageRefused as refused:
            raise BadSource(str(refused)) from refused
        base = self._base(claim)
        key = await asyncio.to_thread(input_key, claim.kind, source, claim.format, base)
        if not claim.force:
            digest = await self._database.call(digest_built_from, key=key, format=claim.format)
            if digest and (entry := self._store.find(digest)):
                log.line("nothing has changed since this was built; force a build to have it made anew")
                return entry, key
        made = await build_image(
            self._store,
            name=claim.name,
            kind=claim.kind,
            settings=source,
            format=claim.format,
            base=base,
            backend=self._backend,
            monitor=log,
            apptainer=settings.SANDBOX_OPTIONS.apptainer,
        )
        return made, key

    def _base(self, claim: BuildClaim) -> Entry | None:
        if not claim.base:
            return None
        if not claim.base_digest:
            raise BuildFailed(f"its base {claim.base} is not ready: see the log of its build")
        base = self._store.find(claim.base_digest)
        if base is None:
            raise BuildFailed(f"its base {claim.base} is ready, but not in {self._store.folder} on this node")
        return base

    async def _beat(self, claim: BuildClaim, log: BuildLog, work: asyncio.Task[tuple[Entry, str]]) -> None:
        while True:
            await asyncio.sleep(settings.HEARTBEAT_SECONDS)
            try:
                answer = await self._database.call(report_build, claim=claim, report=_report(log))
            except (OperationalError, InterfaceError) as error:
                logger.warning("a build's lease is not renewed; trying again", build=claim.build_id, error=str(error))
                continue
            if answer is not Answer.GO_ON:
                logger.info("a build is given up", build=claim.build_id, image=claim.image, reason=answer.value)
                work.cancel()
                return


def _report(log: BuildLog) -> Report:
    return Report(progress=log.share, step=log.step, log_tail=log.tail, log_length=log.length)
