"""A gateway with one session, served by uvicorn in the test's loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn

from rollouts.engine.records import MessageRecord, ToolCallRecord, TurnRecord
from rollouts.gateway import AgentSession, create_app
from rollouts.gateway.endpoint import Limits
from rollouts.llm.buffer import TokenBuffer, reconstruct, validate
from rollouts.llm.client import ModelClient
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import ModelCallRecord, Sampling

KEY = "the key of the session"

BASH = {
    "name": "bash",
    "description": "Runs a command.",
    "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
}


def calls(command: str) -> str:
    """What a model writes to run a command."""
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command}"}}}}\n</tool_call>'


@dataclass
class Memory:
    """A recorder that keeps everything."""

    records: list[TurnRecord] = field(default_factory=list)

    async def turn(self, record: TurnRecord) -> None:
        self.records.append(record)

    @property
    def calls(self) -> list[ModelCallRecord]:
        return [record.model_call for record in self.records if record.model_call]

    @property
    def messages(self) -> list[MessageRecord]:
        return [message for record in self.records for message in record.messages]

    @property
    def tool_calls(self) -> list[ToolCallRecord]:
        return [call for record in self.records for call in record.tool_calls]

    @property
    def prompts(self) -> list[list[int]]:
        """What was sent, by call."""
        return [exchange.prompt_ids for exchange in reconstruct(self.calls)]

    def validated(self) -> TokenBuffer:
        assert [m.index for m in self.messages] == list(range(len(self.messages)))
        return validate(self.calls)


@dataclass
class Gateway:
    """A running gateway. `sessions` are what its keys name."""

    url: str
    sessions: dict[str, Any]
    memory: Memory
    client: ModelClient

    @property
    def session(self) -> AgentSession:
        return self.sessions[KEY]

    async def find(self, key: str) -> AgentSession | None:
        found = self.sessions.get(key)
        if isinstance(found, Exception):
            raise found
        return found


@contextlib.asynccontextmanager
async def open_session(server: ScriptedServer, **options: Any) -> AsyncIterator[Gateway]:
    """A gateway that nobody serves yet. `options` are the session's."""
    client, memory = ModelClient(), Memory()
    options = {"sampling": Sampling(), "call_timeout": 20, "model": "policy", **options}
    route = options.pop("route", None) or FixedRoute(server.address(policy_version=7))
    session = AgentSession(client, route, options.pop("recorder", memory), **options)
    try:
        yield Gateway("", {KEY: session}, memory, client)
    finally:
        await session.close()
        await client.close()


@contextlib.asynccontextmanager
async def serve(server: ScriptedServer, limits: Limits | None = None, **options: Any) -> AsyncIterator[Gateway]:
    """One that listens. `options` are the session's."""
    async with open_session(server, **options) as gateway:
        listener = socket.create_server(("127.0.0.1", 0))
        gateway.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        web = uvicorn.Server(uvicorn.Config(create_app(gateway, limits), log_config=None, lifespan="off"))
        serving = asyncio.create_task(web.serve([listener]))
        try:
            yield gateway
        finally:
            await gateway.session.close()
            web.should_exit = True
            await serving
