"""The gateway of an agent in a sandbox: a loopback port inside that leads to this process, whatever the network policy is."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import uvicorn
from uvicorn.server import ServerState

from rollouts.engine.errors import AttemptSuperseded, EnvironmentFailed, StoreFailed, describe
from rollouts.engine.records import Recorder, TurnRecord
from rollouts.gateway import AgentSession, SessionClosed, create_app
from rollouts.lifecycle import Cause, Fidelity, Phase, Termination
from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ModelError
from rollouts.llm.route import Overtaken, Route
from rollouts.llm.types import Sampling
from sandboxes.network.relay import join
from sandboxes.protocol import Session

# Agents think, and run tools, between two calls over one connection.
_KEEP_ALIVE_SECONDS = 3600


@dataclass
class SandboxGateway:
    """Implements `rollouts.environments.base.AgentGateway` for one attempt of one rollout."""

    client: ModelClient
    route: Route
    recorder: Recorder
    sampling: Sampling
    call_timeout: float  # seconds
    _session: AgentSession | None = field(default=None, init=False)

    @property
    def fidelity(self) -> Fidelity | None:
        return self._session.fidelity if self._session else None

    @contextlib.asynccontextmanager
    async def open(self, sandbox: Session, *, max_calls: int) -> AsyncIterator[_Access]:
        if self._session is not None:
            raise EnvironmentFailed("the agent gateway of a rollout was opened twice")
        access = _Access(max_calls=max_calls, recorder=self.recorder, model=self.route.server.policy)
        self._session = access.session = AgentSession(
            self.client,
            self.route,
            access,
            sampling=self.sampling,
            call_timeout=self.call_timeout,
            model=access.model,
            max_calls=max_calls,
            on_exhausted=access.exhausted,
        )
        server = _Server(access)
        try:
            access.url = f"http://127.0.0.1:{await sandbox.forward(server.serve)}"
            yield access
        finally:
            await access.session.close(SessionClosed("the agent's time is over"))
            await server.close()


class _Access:
    """The one session that can be reached through the port, and what is to be known of it. Also the session's recorder."""

    session: AgentSession
    url: str

    def __init__(self, *, max_calls: int, recorder: Recorder, model: str) -> None:
        self.key = secrets.token_urlsafe(32)
        self.model = model
        self._max_calls = max_calls
        self._recorder = recorder
        self._over = asyncio.Event()
        self._error: StoreFailed | AttemptSuperseded | Overtaken | None = None

    @property
    def calls(self) -> int:
        return self.session.calls

    @property
    def overflowed(self) -> bool:
        return self.session.overflows > 0

    @property
    def failure(self) -> ModelError | None:
        return self.session.failure

    async def until_over(self) -> Termination:
        await self._over.wait()
        if self._error is not None:
            raise self._error
        return Termination(Phase.RUN, Cause.MAX_TURNS, f"the agent wanted more than {self._max_calls} model calls")

    async def find(self, key: str) -> AgentSession | None:
        """Of every request. The port is of one sandbox, so the key of any other leads nowhere."""
        if not secrets.compare_digest(key.encode(), self.key.encode()):
            return None
        if isinstance(self.session.failure, Overtaken):
            self._end(self.session.failure)  # whatever else it tries
        return self.session

    def exhausted(self) -> None:
        """The agent wants another call after all that it may make."""
        self._over.set()

    async def turn(self, record: TurnRecord) -> None:
        try:
            await self._recorder.turn(record)
        except AttemptSuperseded as exc:
            self._end(exc)
            raise
        except Exception as exc:
            self._end(StoreFailed(f"call {record.turn} could not be stored: {describe(exc)}"))
            raise

    def _end(self, error: StoreFailed | AttemptSuperseded | Overtaken) -> None:
        self._error = error
        self._over.set()


class _Server:
    """HTTP for the connections of one forwarded port. There is no socket that anybody else could reach."""

    def __init__(self, access: _Access) -> None:
        self._config = uvicorn.Config(
            create_app(access),
            interface="asgi3",
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        )
        self._config.load()
        self._make_protocol: Callable[..., asyncio.Protocol] = self._config.http_protocol_class
        self._state = ServerState()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """For `Session.forward`."""
        ours, theirs = socket.socketpair()
        await asyncio.get_running_loop().connect_accepted_socket(self._protocol, theirs)
        await join(reader, writer, *await asyncio.open_connection(sock=ours))

    async def close(self) -> None:
        """End the connections once their answers are written."""
        tasks = list(self._state.tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        for task in self._state.tasks:
            task.cancel()
        for connection in list(self._state.connections):
            connection.shutdown()

    def _protocol(self) -> asyncio.Protocol:
        return self._make_protocol(config=self._config, server_state=self._state, app_state={})
