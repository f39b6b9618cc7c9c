"""Model URLs for agents that know nothing of us: their calls are sampled and recorded as exact tokens. No Django.

A key names an `AgentSession`. `create_app` speaks the APIs that agents use and hands every call to the session of its key.
"""

from __future__ import annotations

from rollouts.gateway.app import create_app
from rollouts.gateway.directory import SessionDirectory
from rollouts.gateway.errors import SessionClosed
from rollouts.gateway.session import AgentSession

__all__ = ["AgentSession", "SessionClosed", "SessionDirectory", "create_app"]
