"""Sessions of agents outside any sandbox, as context managers: opened, kept alive beside the agent, and closed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from . import calls
from .calls import Call
from .errors import ApiError
from .types import OpenedSession, RewardComponent
from .types import Session as SessionInfo

if TYPE_CHECKING:
    from .aio import AsyncClient
    from .sync import Client


class _Opened:
    """What an agent needs of its session, and what is said when it ends.

    Point the agent's own client at `openai_url`, `anthropic_url` or `google_url`, with `key` as its API key and any model name.
    `artefacts` is what the environment scores when no reward is given; fill it while the session is open.
    """

    def __init__(self, opening: Call[OpenedSession]) -> None:
        self.artefacts: dict[str, Any] = {}
        self._opening = opening
        self._opened: OpenedSession | None = None
        self._is_closed = False

    @property
    def info(self) -> OpenedSession:
        """What the server said of it at the beginning."""
        if self._opened is None:
            raise RuntimeError("the session is not open yet: use it in a `with` statement")
        return self._opened

    @property
    def id(self) -> str:
        """Also that of its rollout."""
        return self.info["id"]

    @property
    def key(self) -> str:
        return self.info["key"]

    @property
    def openai_url(self) -> str:
        return self.info["base_urls"]["openai"]

    @property
    def anthropic_url(self) -> str:
        return self.info["base_urls"]["anthropic"]

    @property
    def google_url(self) -> str:
        return self.info["base_urls"]["google"]

    def _ending(self, error: BaseException | None) -> Call[SessionInfo]:
        """An agent that raised could not go on; one that was stopped is not wanted any more."""
        if error is None:
            return calls.close_session(self.id, "completed", None, self.artefacts, "")
        outcome = "failed" if isinstance(error, Exception) else "abandoned"
        return calls.close_session(self.id, outcome, None, self.artefacts, f"{type(error).__name__}: {error}"[:500])


class Session(_Opened):
    """A session of `Client`: `with client.session(policy="tiny") as session: ...`

    Leaving the block closes it as completed, or as failed when the agent raised; a thread sends heartbeats until then.
    """

    def __init__(self, client: Client, opening: Call[OpenedSession]) -> None:
        super().__init__(opening)
        self._client = client
        self._over = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="session heartbeat", daemon=True)

    def __enter__(self) -> Self:
        self._opened = self._client._send(self._opening)
        self._heart.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._over.set()
        if self._is_closed:
            return
        # What the agent raised matters more than that its session had ended already.
        with contextlib.suppress(*((ApiError, httpx.TransportError) if error else ())):
            self._client._send(self._ending(error))

    def reward(self, value: float | None = None, *, components: Iterable[RewardComponent] | None = None) -> None:
        """Say what it is worth: a number, or named components. What is said last counts, once the session is closed."""
        self._client._send(calls.give_reward(self.id, value, components))

    def close(self, outcome: str = "completed", *, detail: str = "") -> SessionInfo:
        """End it before the block does: `completed`, `max_turns`, `failed` or `abandoned`."""
        info = self._client._send(calls.close_session(self.id, outcome, None, self.artefacts, detail))
        self._is_closed = True
        self._over.set()
        return info

    def _beat(self) -> None:
        while not self._over.wait(self.info["heartbeat_seconds"]):
            try:
                self._client._send(calls.send_heartbeat(self.id))
            except ApiError:
                return  # it has ended; whoever uses it learns that from the next call
            except httpx.TransportError:
                continue  # it has a while


class AsyncSession(_Opened):
    """A session of `AsyncClient`: `async with client.session(policy="tiny") as session: ...`

    Leaving the block closes it as completed, as failed when the agent raised, and as abandoned when its task was cancelled; a
    task sends heartbeats until then.
    """

    def __init__(self, client: AsyncClient, opening: Call[OpenedSession]) -> None:
        super().__init__(opening)
        self._client = client
        self._heart: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        opened: OpenedSession = await self._client._send(self._opening)
        self._opened = opened
        self._heart = asyncio.create_task(self._beat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stop_heart()
        if self._is_closed:
            return
        with contextlib.suppress(*((ApiError, httpx.TransportError) if error else ())):
            await self._client._send(self._ending(error))

    async def reward(self, value: float | None = None, *, components: Iterable[RewardComponent] | None = None) -> None:
        """Say what it is worth: a number, or named components. What is said last counts, once the session is closed."""
        await self._client._send(calls.give_reward(self.id, value, components))

    async def close(self, outcome: str = "completed", *, detail: str = "") -> SessionInfo:
        """End it before the block does: `completed`, `max_turns`, `failed` or `abandoned`."""
        info = await self._client._send(calls.close_session(self.id, outcome, None, self.artefacts, detail))
        self._is_closed = True
        await self._stop_heart()
        return info

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.info["heartbeat_seconds"])
            try:
                await self._client._send(calls.send_heartbeat(self.id))
            except ApiError:
                return
            except httpx.TransportError:
                continue

    async def _stop_heart(self) -> None:
        if self._heart is not None:
            self._heart.cancel()
            await asyncio.wait([self._heart])
