"""What agents send through the gateway, in the database and back."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from rollouts.gateway.requests import FunctionTool, ModelRequest, Wishes
from rollouts.lifecycle import Stage, State
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import ChatMessage
from rollouts.models import Message
from rollouts.selectors.trajectory import message_count, stored_calls
from rollouts.services.progress import TurnWrite, record_turns
from tests.integration.domain import Domain
from tests.unit.gateways import Memory, open_session

NAME = "a\x00" + "long " * 40
TOOL = FunctionTool(NAME, "", {"type": "object"})


def ask(*messages: ChatMessage) -> ModelRequest:
    wishes = Wishes(stop=("\x00", "\ud800"), seed=2**62)
    return ModelRequest(dialect="openai-completions", model="m", messages=messages, tools=(TOOL,), wishes=wishes)


async def _talk(memory: Memory) -> None:
    call = {"id": "1", "type": "function", "function": {"name": NAME, "arguments": "no json \x00"}}
    first: ChatMessage = {"role": "user", "content": "[[reply:one]][[reply2:two]]", "name": NAME}
    async with ScriptedServer() as server, open_session(server, recorder=memory, route=_nameless(server)) as gateway:
        reply = await gateway.session.reply(ask(first))
        said: ChatMessage = {**reply.told.message(), "tool_calls": [call]}
        await gateway.session.reply(ask(first, said, {"role": "tool", "content": "\x00", "tool_call_id": "1", "name": NAME}))


def _nameless(server: ScriptedServer) -> FixedRoute:
    """Its rows would refer to a server that no database has."""
    return FixedRoute(replace(server.address(), server_id=""))


def test_what_agents_may_send_can_be_stored_and_gone_on_from(domain: Domain):
    memory = Memory()
    asyncio.run(_talk(memory))
    rollout = domain.rollout_in(State.READY)
    claim = domain.claim(rollout, Stage.RUN)
    for record in memory.records:
        assert record_turns([TurnWrite(claim, record)]) == [True]
    calls = stored_calls(rollout.id, claim.attempt)
    assert [c.conversation_key for c in calls] == [c.conversation_key for c in memory.calls]
    assert [c.sampled_ids for c in calls] == [c.sampled_ids for c in memory.calls]
    assert message_count(rollout.id, claim.attempt) == Message.objects.filter(rollout=rollout).count() == len(memory.messages)
