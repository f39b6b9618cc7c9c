"""`prorl gateway`: the model URL of agents outside any sandbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Mapping
from uuid import UUID

import structlog
import uvicorn
from django.conf import settings
from django.db import OperationalError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from rollouts.gateway import create_app
from rollouts.lifecycle import GATEWAY
from rollouts.llm.client import ModelClient
from rollouts.services.lease import Heartbeat, announce_drain, deregister_worker, register_worker, renew

from .database import Database
from .fleet import FleetView
from .gateway_sessions import GatewaySessions

logger = structlog.get_logger(__name__)

# How long calls in flight may go on after SIGTERM: their agents send them again, to another process or to the next one here.
_GRACE_SECONDS = 2.0
_KEEP_ALIVE_SECONDS = 75  # agents think, and run tools, between two calls of one connection


class GatewayProcess:
    """Serves sessions until SIGTERM, or until it has drained after SIGUSR1."""

    def __init__(self, *, node: str, host: str, port: int) -> None:
        self._node = node
        self._id: UUID | None = None
        self._renewed_at = 0.0
        self._draining = False
        self._looking: asyncio.Task[None] | None = None
        self._database = Database(patience=settings.LEASE_SECONDS)
        # However long calls wait for the database: the lease does not wait behind them.
        self._lease = Database(patience=settings.LEASE_SECONDS, threads=1)
        self._client = ModelClient()
        self._fleet = FleetView(self._database, lambda: self._id)
        self._sessions = GatewaySessions(
            database=self._database, client=self._client, fleet=self._fleet, node=node, owner=lambda: self._id
        )
        self._server = _Server(
            uvicorn.Config(
                self._with_readiness(create_app(self._sessions)),
                host=host,
                port=port,
                lifespan="off",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            )
        )

    async def run(self) -> None:
        """Raises `StoreFailed` when the database does not answer at the start."""
        loop = asyncio.get_running_loop()
        await self._register()
        for number, grace in (
            (signal.SIGTERM, _GRACE_SECONDS),
            (signal.SIGINT, _GRACE_SECONDS),
            (signal.SIGUSR1, settings.DRAIN_SECONDS),
        ):
            loop.add_signal_handler(number, self._stop, grace)
        background = [loop.create_task(self._fleet.run()), loop.create_task(self._keep_lease())]
        try:
            await self._server.serve()
        finally:
            background += [self._looking] if self._looking else []
            for task in background:
                task.cancel()
            await asyncio.wait(background)
            await self._say_goodbye()

    def _stop(self, grace: float) -> None:
        """Take no connections any more, and end when the calls in flight have. A later, shorter `grace` holds."""
        self._draining = True
        self._server.config.timeout_graceful_shutdown = int(grace)
        self._server.should_exit = True

    async def _say_goodbye(self) -> None:
        await self._sessions.drop_all()
        if self._id is not None:
            await self._database.call(deregister_worker, worker_id=self._id)
        await self._client.close()
        self._database.close()
        self._lease.close()

    # --- The lease ---------------------------------------------------------------------------------------------------------

    async def _register(self) -> None:
        self._id = await self._lease.insist(register_worker, node=self._node, stage=GATEWAY, pid=os.getpid(), concurrency=0)
        self._renewed_at = asyncio.get_running_loop().time()

    async def _keep_lease(self) -> None:
        announced = False
        while True:
            await asyncio.sleep(settings.HEARTBEAT_SECONDS)
            try:
                if self._draining and not announced and self._id is not None:
                    await self._lease.call(announce_drain, worker_id=self._id)
                    announced = True
                await self._renew_once()
            except OperationalError as error:
                logger.warning("lease not renewed; trying again", worker=self._id, error=str(error))
            except Exception:
                logger.exception("lease not renewed; trying again", worker=self._id)

    async def _renew_once(self) -> None:
        assert self._id is not None  # noqa: S101 - registered before the loop starts
        known = self._sessions.known()
        beat = await self._lease.call(renew, worker_id=self._id)
        if not beat.alive:
            logger.warning("declared lost; starting over", worker=self._id, sessions=len(known))
            self._id = None  # so that nothing is taken under it
            await self._sessions.drop_all()
            await self._register()
            return
        self._renewed_at = asyncio.get_running_loop().time()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self._look_after(beat, known))

    async def _look_after(self, beat: Heartbeat, known: Mapping[UUID, object]) -> None:
        """Beside the renewals, which must not wait for calls that are still being stored."""
        try:
            await self._sessions.look_after(beat.held, known)
        except OperationalError as error:
            logger.warning("sessions not looked after; trying again", worker=self._id, error=str(error))
        except Exception:
            logger.exception("sessions not looked after; trying again", worker=self._id)

    # --- Readiness ---------------------------------------------------------------------------------------------------------

    def _with_readiness(self, app: ASGIApp) -> ASGIApp:
        async def serve(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] != "http" or scope["path"] != "/readyz":
                await app(scope, receive, send)
                return
            reason = self._why_not_ready()
            await JSONResponse({"ready": not reason, "reason": reason}, 503 if reason else 200)(scope, receive, send)

        return serve

    def _why_not_ready(self) -> str:
        """Empty when calls can be served here."""
        if self._draining:
            return "it is stopping"
        silent = asyncio.get_running_loop().time() - self._renewed_at
        return "the database does not answer" if silent > settings.LEASE_SECONDS else ""


class _Server(uvicorn.Server):
    """Leaves signals to the process: what it holds is given back after the last call, and not lost to a raised signal."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
