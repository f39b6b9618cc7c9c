"""Where the gateway finds the session of a key. Hosts implement it."""

from __future__ import annotations

from typing import Protocol

from rollouts.gateway.session import AgentSession


class SessionDirectory(Protocol):
    """The sessions that one gateway serves."""

    async def find(self, key: str) -> AgentSession | None:
        """The session of this key, or None where there is none. Raises `SessionClosed`."""
        ...
