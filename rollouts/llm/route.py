"""Where a rollout's model calls go, turn by turn."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from rollouts.llm.errors import ModelError
from rollouts.llm.types import ServerAddress


class Route(Protocol):
    """One rollout's (or agent session's) way to the servers of its policy.

    It stays on one server, for its prefix cache, until that one cannot or should not be used any more. It changes only at the
    start of a call; what was sampled before is sent to the new one as ids.
    """

    @property
    def server(self) -> ServerAddress:
        """The server it is on: for what samples nothing (rendering, limits)."""
        ...

    @property
    def only_version(self) -> int | None:
        """The one policy version that may be sampled from here; None where any may."""
        ...

    def call(self) -> AbstractAsyncContextManager[ServerAddress]:
        """The server for one call, which counts as in flight there inside of the context.

        Entering waits while the servers take no new calls (a weight update). Raises `ModelError` when no server can be used.
        When the body raises a `ModelError`, the server is reported for it, and the next call may get another one. When the
        weights are updated with mode `abort`, the context raises `CallCut`.
        """
        ...


class CallCut(ModelError):
    """A weight update cut this call; it is to be made again, from the ids sampled so far where the server gave them."""

    def __init__(self) -> None:
        super().__init__("a weight update cut the call", retryable=True)


class NoServer(ModelError):
    """No server of the policy can be used, and waiting for one has taken long enough: sampling again would only wait again."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class Overtaken(ModelError):
    """New weights have come since the rollout began, and it may be sampled from one version only: it is to be begun anew."""

    def __init__(self, began_on: int, now: int) -> None:
        super().__init__(f"it began on version {began_on}, and it would go on with {now}", retryable=False)


class OneVersionRoute:
    """Another route, as long as that leads to servers of `version`. Then its calls raise `Overtaken`."""

    def __init__(self, route: Route, version: int) -> None:
        self.only_version = version
        self._route = route

    @property
    def server(self) -> ServerAddress:
        return self._route.server

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[ServerAddress]:
        async with self._route.call() as server:
            if server.policy_version != self.only_version:
                raise Overtaken(self.only_version, server.policy_version)
            yield server


class FixedRoute:
    """Whatever `server` is."""

    def __init__(self, server: ServerAddress) -> None:
        self.server = server
        self.only_version: int | None = None

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[ServerAddress]:
        yield self.server
