"""The maintenance worker: builds images, several at once, verifies them, and prunes what is not needed any more.

Postgres is the queue. A message through Celery says that there is something new; without one the worker looks by itself now
and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine, Iterable
from concurrent.futures import Future
from typing import Any

import structlog
from celery.signals import worker_shutting_down
from django.conf import settings
from django.db import InterfaceError, OperationalError

from prorl_site import logs
from prorl_site.celery import run_worker, wake_celery
from rollouts.services.dispatch import MAINTENANCE_QUEUE
from rollouts.services.images import prune_as_configured
from sandboxes.images.services.builds import BuildClaim, claim_build, running_names
from sandboxes.images.services.prune import sweep
from sandboxes.images.services.use import image_store
from sandboxes.images.services.verification import note_verified, take_verification
from sandboxes.images.verify import is_verification, verify
from sandboxes.models import Image
from sandboxes.protocol import Backend

from .database import Database
from .image_builds import ImageBuilder, builds_backend

logger = structlog.get_logger(__name__)

_POLL_SECONDS = 5.0
_PRUNE_SECONDS = 3600.0
_STOP_SECONDS = 20.0  # programs that build are asked to end first

_worker: MaintenanceWorker | None = None


class MaintenanceWorker:
    """Threads call `wake` and `stop`; everything else runs on the loop."""

    def __init__(self, *, node: str, builds: int) -> None:
        """`builds`: how many at once; a verification counts as one."""
        self._node = node
        self._slots = builds
        self._database = Database(patience=settings.LEASE_SECONDS)
        self._store = image_store()
        self._backend = builds_backend()
        self._builder = ImageBuilder(database=self._database, store=self._store, backend=self._backend)
        self._work: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="maintenance", daemon=True)
        self._main: Future[None] | None = None
        self._news = asyncio.Event()
        self._strays: set[str] = set()  # at the last sweep

    def start(self) -> None:
        self._thread.start()
        self._main = self._submit(self._run())

    def wake(self) -> None:
        """There may be something to do."""
        self._loop.call_soon_threadsafe(self._news.set)

    def stop(self) -> None:
        """Give back what is being built. Bounded in time."""
        if self._main is not None:
            self._main.cancel()
            with contextlib.suppress(TimeoutError):
                self._submit(self._give_back()).result(_STOP_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(1.0)
        self._database.close()

    def _submit(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _run(self) -> None:
        clean = asyncio.create_task(self._keep_clean())
        try:
            while True:
                self._news.clear()
                try:
                    await self._take()
                except (OperationalError, InterfaceError) as error:
                    logger.warning("the database does not answer; trying again", error=str(error))
                except Exception:
                    logger.exception("could not take builds; trying again", seconds=_POLL_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_POLL_SECONDS):
                        await self._news.wait()
        finally:
            clean.cancel()

    async def _take(self) -> None:
        while len(self._work) < self._slots:
            if (claim := await self._database.call(claim_build, node=self._node)) is not None:
                self._begin(self._build(claim))
            elif (image := await self._database.call(take_verification)) is not None:
                self._begin(self._verify(image))
            else:
                return

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._released)

    def _released(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        self._news.set()

    async def _build(self, claim: BuildClaim) -> None:
        with logs.bound(image=claim.image, build=claim.build_id, node=self._node):
            logger.info("build begun")
            try:
                await self._builder.carry_out(claim)
            except Exception:
                logger.exception("could not store how a build ended")
            logger.info("build ended")

    async def _verify(self, image: Image) -> None:
        try:
            problems = await verify(self._store, image.digest, self._backend)
            await self._database.call(note_verified, image=image, problems=problems)
            logger.info("image verified", image=image.name, problems=problems)
        except Exception:
            logger.exception("could not verify an image", image=image.name)

    async def _give_back(self) -> None:
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    async def _keep_clean(self) -> None:
        """What killed workers left behind, and what is not needed any more."""
        while True:
            try:
                await self._sweep()
                for item in await self._database.call(prune_as_configured):
                    logger.info("image pruned", images=item.images, digest=item.digest, size=item.size, reason=item.reason)
            except Exception:
                logger.exception("could not clean up; trying again", seconds=_PRUNE_SECONDS)
            await asyncio.sleep(_PRUNE_SECONDS)

    async def _sweep(self) -> None:
        present = await self._backend.list()  # before the question what is wanted, so that what starts meanwhile is left alone
        wanted = await self._database.call(running_names, node=self._node)
        strays = {name for name in present if name not in wanted}
        # Verifications are not noted anywhere: one that was there an hour ago is over.
        await stop_strays(self._backend, {name for name in strays if not is_verification(name) or name in self._strays})
        self._strays = strays
        for name in await self._database.call(sweep, self._store):
            logger.info("leftover of a build removed", workspace=name)


async def stop_strays(backend: Backend, names: Iterable[str]) -> None:
    """Stop sandboxes that nobody wants any more. One that does not end keeps no other, and is tried again next time."""
    for name in sorted(names):
        try:
            await backend.stop(name)
            logger.info("stray sandbox of a build stopped", sandbox=name)
        except Exception:
            logger.exception("stray sandbox of a build not stopped; trying again", sandbox=name)


def serve(*, node: str, builds: int) -> int:
    """Run the maintenance worker in this process until SIGTERM; returns the exit code."""
    global _worker
    _worker = MaintenanceWorker(node=node, builds=builds)
    worker_shutting_down.connect(_stop)
    return run_worker(f"{MAINTENANCE_QUEUE}@{node}", queue=MAINTENANCE_QUEUE, threads=1, begin=_worker.start)


def wake() -> None:
    """The body of the job."""
    if _worker is None:
        raise RuntimeError("maintenance jobs run in a process started by `manage.py maintain`")
    _worker.wake()


def _stop(**_: Any) -> None:
    try:
        if _worker is not None:
            _worker.stop()
    finally:
        wake_celery()
