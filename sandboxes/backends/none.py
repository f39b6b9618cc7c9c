"""No sandboxes: for hosts that only run rollouts of environments without one. No Django."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sandboxes.errors import BackendUnavailable, SandboxLost
from sandboxes.options import NodeOptions
from sandboxes.protocol import HOST, Root, SandboxInfo, SandboxSpec, Session


class NoBackend:
    """Implements `sandboxes.protocol.Backend` without ever starting anything."""

    name = "none"

    def __init__(self, state_dir: Path, options: NodeOptions | None = None) -> None:
        self.state_dir = state_dir

    async def probe(self) -> Mapping[str, str]:
        return {}

    async def start(self, name: str, spec: SandboxSpec, root: Root = HOST) -> SandboxInfo:
        raise BackendUnavailable(f"{name}: PRORL_SANDBOX_BACKEND is `none` on this node: it has no sandboxes")

    async def connect(self, name: str) -> Session:
        raise SandboxLost(f"{name}: there are no sandboxes on this node")

    async def rename(self, name: str, new_name: str) -> None:
        raise SandboxLost(f"{name}: there are no sandboxes on this node")

    async def stop(self, name: str) -> None:
        pass

    async def list(self) -> list[str]:
        return []
