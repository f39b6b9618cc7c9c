"""Conversations: what is sent is what was sampled, and the badge says when it is not."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence

import pytest

from rollouts.lifecycle import Fidelity
from rollouts.llm.buffer import reconstruct, validate
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.scripted.template import DEFAULT_SYSTEM, chatml, chatml_dropping_reasoning
from rollouts.llm.types import ChatMessage, ModelCallRecord, Sampling


@pytest.fixture
async def client() -> AsyncIterator[ModelClient]:
    client = ModelClient()
    yield client
    await client.close()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def tool(text: str) -> ChatMessage:
    return {"role": "tool", "content": text}


def talk(client: ModelClient, server: ScriptedServer, first: str, **options) -> Conversation:
    route = options.pop("route", None) or FixedRoute(server.address(policy_version=7))
    conversation = Conversation(client, route, Sampling(), call_timeout=20, **options)
    conversation.append(user(first))
    return conversation


async def play(conversation: Conversation, *later: Sequence[ChatMessage]) -> list[ModelCallRecord]:
    """Sample, then append and sample again for each of `later`; the stored calls must be consistent."""
    calls = [await conversation.sample(0)]
    for turn, messages in enumerate(later, start=1):
        conversation.append(*messages)
        calls.append(await conversation.sample(turn))
    validate(calls)
    return calls


THREE_TURNS = "[[reply:the number is there]][[reply2:another one]][[reply3:and that is all]]"


async def test_a_conversation_is_one_sequence_that_reads_as_the_template_writes_it(client, server):
    conversation = talk(client, server, THREE_TURNS)
    calls = await play(conversation, [tool("\n3"), tool("4")], [user("go on")])
    assert conversation.fidelity is Fidelity.TOKEN_EXACT
    assert [call.segment for call in calls] == [0, 0, 0]
    assert [message["content"] for message in conversation.messages] == [
        THREE_TURNS,
        "the number is there",
        "\n3",
        "4",
        "another one",
        "go on",
        "and that is all",
    ]
    last = reconstruct(calls)[-1]
    text = await client.detokenize(server.address(), last.prompt_ids)
    assert text == chatml(conversation.messages[:-1], True)
    assert text.count(DEFAULT_SYSTEM) == 1


async def test_every_prompt_begins_with_what_was_sent_and_sampled_before(client, server):
    calls = await play(talk(client, server, THREE_TURNS), [user("a")], [user("b")])
    exchanges = reconstruct(calls)
    for earlier, later in itertools.pairwise(exchanges):
        so_far = earlier.prompt_ids + earlier.sampled_ids
        assert later.prompt_ids[: len(so_far)] == so_far


async def test_sampled_ids_are_not_the_ones_that_their_text_encodes_to(client, server):
    """If they were, this server could not show a client that encodes again."""
    conversation = talk(client, server, "[[reply:the other number is therefore another one]]")
    calls = await play(conversation, [user("on")])
    encoded = await client.render(server.address(), conversation.messages[:3], add_generation_prompt=True)
    assert encoded.ids != reconstruct(calls)[-1].prompt_ids


async def test_a_record_says_where_it_came_from(client, server):
    (call,) = await play(talk(client, server, "[[reply:yes]]"))
    assert (call.policy, call.policy_version, call.server_id) == ("policy", 7, "scripted")
    assert call.prompt_tokens == len(call.context_ids)
    assert call.sampling == {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 512, "stop": [], "seed": None}
    assert (call.text, call.finish_reason) == ("yes", "stop")
    assert call.latency > 0


async def test_sampling_twice_in_a_row_opens_a_second_reply(client, server):
    conversation = talk(client, server, "[[reply:one]][[reply2:two]]")
    await play(conversation, [])
    assert conversation.fidelity is Fidelity.TOKEN_EXACT
    assert [message["content"] for message in conversation.messages[1:]] == ["one", "two"]


async def test_a_reply_without_end_of_turn_starts_a_new_segment(client, server):
    conversation = talk(client, server, "[[reply:cut off]][[length1]]")
    calls = await play(conversation, [user("go on")])
    assert conversation.fidelity is Fidelity.SEGMENTED
    assert [call.segment for call in calls] == [0, 1]
    rendered = await client.render(server.address(), conversation.messages[:3], add_generation_prompt=True)
    assert calls[1].context_ids == rendered.ids


async def test_reasoning_that_the_template_drops_starts_a_new_segment(client):
    async with ScriptedServer(template=chatml_dropping_reasoning) as server:
        conversation = talk(client, server, "[[reply:<think>hm</think>a call]][[reply2:<think>so</think>done]]")
        calls = await play(conversation, [tool("result")], [user("next")])
        assert [call.segment for call in calls] == [0, 0, 1], (
            "kept before a tool's result, dropped before the user's next question"
        )
        seen = await client.detokenize(server.address(), calls[2].context_ids)
        assert "hm" not in seen.replace(conversation.messages[0]["content"], "")
        assert conversation.fidelity is Fidelity.SEGMENTED


async def test_reasoning_that_the_template_keeps_stays_one_sequence(client, server):
    conversation = talk(client, server, "[[reply:<think>hm</think>one]][[reply2:two]]")
    await play(conversation, [user("next")], [user("next")])
    assert conversation.fidelity is Fidelity.TOKEN_EXACT


async def test_reasoning_that_the_template_never_shows_starts_a_new_segment(client):
    def forgetful(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        said = [m["content"].rpartition("</think>\n\n")[2] if m["role"] == "assistant" else m["content"] for m in messages]
        return chatml([{**m, "content": content} for m, content in zip(messages, said, strict=True)], add_generation_prompt)

    async with ScriptedServer(template=forgetful) as server:
        conversation = talk(client, server, "[[reply:<think>hm</think>\n\none]][[reply2:two]]")
        calls = await play(conversation, [user("next")])
        assert [call.segment for call in calls] == [0, 1]


@pytest.mark.parametrize("hoisted", ["system", "tool"])
async def test_a_template_that_rewrites_earlier_messages_starts_a_new_segment(client, hoisted):
    def hoisting(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        first = [m for m in messages if m["role"] == hoisted]
        return chatml([*first, *(m for m in messages if m["role"] != hoisted)], add_generation_prompt)

    async with ScriptedServer(template=hoisting) as server:
        conversation = talk(client, server, "[[reply:one]][[reply2:two]]")
        calls = await play(conversation, [{"role": hoisted, "content": "a new rule"}])
        assert [call.segment for call in calls] == [0, 1]
        text = await client.detokenize(server.address(), calls[1].context_ids)
        assert text.count("a new rule") == 1


async def test_a_template_without_end_of_turn_is_segmented(client):
    def bare(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        return "".join(f"### {m['role']}: {m['content']}" for m in messages) + (
            "### assistant: " if add_generation_prompt else ""
        )

    async with ScriptedServer(template=bare) as server:
        conversation = talk(client, server, "hello")
        await play(conversation, [user("again")])
        assert conversation.fidelity is Fidelity.SEGMENTED


async def test_a_template_that_changes_underway_is_noticed(client):
    today = "Monday"

    def dated(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        return chatml([{"role": "system", "content": f"It is {today}."}, *messages], add_generation_prompt)

    async with ScriptedServer(template=dated) as server:
        conversation = talk(client, server, "[[reply:one]][[reply2:two]][[reply3:three]]")
        first = await play(conversation, [user("a")])
        today = "Tuesday"
        conversation.append(user("b"))
        validate([*first, await conversation.sample(2)])
        assert conversation.fidelity is Fidelity.TOKEN_EXACT


async def test_without_ids_the_trajectory_is_text_only(client, server):
    server.switches.omit_token_ids = True
    conversation = talk(client, server, "[[reply:one]][[reply2:two]]")
    calls = await play(conversation, [user("a")])
    assert conversation.fidelity is Fidelity.TEXT_ONLY
    assert [(call.segment, call.sampled_ids, call.logprobs) for call in calls] == [(0, [], None), (1, [], None)]
    assert [call.text for call in calls] == ["one", "two"]


async def test_a_failed_turn_can_be_tried_again(client, server):
    conversation = talk(client, server, "[[reply:one]][[reply2:two]]")
    first = await conversation.sample(0)
    conversation.append(user("a"))
    server.switches.fail_next, server.switches.status = 1, 400
    with pytest.raises(ModelError):
        await conversation.sample(1)
    assert [message["content"] for message in conversation.messages[1:]] == ["one", "a"]
    second = await conversation.sample(1)
    validate([first, second])
    assert second.text == "two"


async def test_a_segment_says_why_it_began_and_after_which(client, server):
    conversation = talk(client, server, "[[reply:cut off]][[length1]][[reply2:two]]")
    calls = await play(conversation, [user("go on")], [user("and on")])
    assert [(call.opened_by, call.parent_segment) for call in calls] == [("start", None), ("cut", 0), ("", None)]


async def test_a_reply_that_ends_at_a_stop_string_is_cut_too(client, server):
    conversation = Conversation(client, FixedRoute(server.address()), Sampling(stop=("STOP",)), call_timeout=20)
    conversation.append(user("[[reply:well STOP here]][[reply2:two]]"))
    calls = await play(conversation, [user("go on")])
    assert [(call.text, call.opened_by) for call in calls] == [("well STOP", "start"), ("two", "cut")]


async def test_a_picture_is_refused_and_not_dropped(client, server):
    conversation = talk(client, server, "look at this")
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    conversation.append({"role": "user", "content": "", "parts": [{"type": "text", "text": "this"}, picture]})
    with pytest.raises(ModelError, match="message 1 has a part of type 'image_url'"):
        await conversation.sample(0)
    assert server.running == server.finished == 0


async def test_another_server_can_take_over_at_a_turn_boundary(client, server):
    route = FixedRoute(server.address(policy_version=7))
    conversation = talk(client, server, "[[reply:one]][[reply2:two]]", route=route)
    first = await conversation.sample(0)
    async with ScriptedServer() as other:
        route.server = other.address(policy_version=8)
        conversation.append(user("a"))
        second = await conversation.sample(1)
    validate([first, second])
    assert (second.text, second.policy_version) == ("two", 8)
    assert conversation.fidelity is Fidelity.TOKEN_EXACT


async def test_a_server_that_dies_while_tools_run_ends_no_conversation(client, server):
    class Way(FixedRoute):
        """Leaves a server that fails, as the route of a worker does."""

        only_version = None

        @contextlib.asynccontextmanager
        async def call(self):
            try:
                yield self.server
            except ModelError:
                self.server = server.address()
                raise

    async with ScriptedServer() as dying:
        route = Way(dying.address())
        conversation = talk(client, server, "[[reply:one]][[reply2:two]]", route=route)
        first = await conversation.sample(0)
    conversation.append(tool("a"))
    second = await conversation.sample(1)
    validate([first, second])
    assert (second.text, conversation.fidelity) == ("two", Fidelity.TOKEN_EXACT)


async def test_a_conversation_that_outgrows_the_context(client):
    async with ScriptedServer(max_model_len=300) as server:
        conversation = talk(client, server, "[[reply:one]]")
        await conversation.sample(0)
        conversation.append(user("word " * 300))
        with pytest.raises(ContextOverflow):
            await conversation.sample(1)
        assert conversation.fidelity is Fidelity.TOKEN_EXACT


async def test_many_conversations_share_the_base_renders(client, server):
    async def one(number: int) -> Fidelity:
        conversation = talk(client, server, f"[[reply:{number}]][[reply2:{number} again]]")
        calls = await play(conversation, [user("a")])
        assert [call.text for call in calls] == [f"{number}", f"{number} again"]
        return conversation.fidelity

    assert set(await asyncio.gather(*(one(n) for n in range(100)))) == {Fidelity.TOKEN_EXACT}
    assert server.rendered == 100 + 100 + 2
