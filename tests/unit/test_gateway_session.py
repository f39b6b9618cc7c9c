"""Sessions: which reply a request goes on from, what is recorded, and how they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from rollouts.engine.errors import AttemptSuperseded
from rollouts.engine.records import TurnRecord
from rollouts.gateway import AgentSession, SessionClosed
from rollouts.gateway.errors import CallRefused, Kind, SessionMoved
from rollouts.gateway.remembered import RememberedConversations
from rollouts.gateway.replies import Reply
from rollouts.gateway.requests import FunctionTool, ModelRequest
from rollouts.lifecycle import Fidelity
from rollouts.llm.capabilities import Feature
from rollouts.llm.route import CallCut, FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.scripted.template import chatml, chatml_dropping_reasoning
from rollouts.llm.types import ChatMessage, Sampling, ServerAddress
from tests.unit.gateways import BASH, KEY, Gateway, Memory, calls, open_session, serve

TOOL = FunctionTool(BASH["name"], BASH["description"], BASH["parameters"])


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer() as server:
        yield server


@pytest.fixture
async def gateway(server: ScriptedServer) -> AsyncIterator[Gateway]:
    async with serve(server) as gateway:
        yield gateway


def said(role: str, text: str) -> ChatMessage:
    return {"role": role, "content": text}  # type: ignore[typeddict-item]


def request(*messages: ChatMessage, **more) -> ModelRequest:
    return ModelRequest(dialect="test", model="m", messages=messages, **more)


class Agent:
    """Keeps a conversation as agents do."""

    def __init__(self, session: AgentSession, first: str, system: str = "") -> None:
        self.session = session
        self.messages = [*([said("system", system)] if system else []), said("user", first)]

    async def ask(self, *messages: ChatMessage, **more) -> str:
        self.messages += messages
        reply = await self.session.reply(request(*self.messages, **more))
        self.messages.append(reply.told.message())
        return reply.told.content


async def test_conversations_that_interleave_keep_their_segments(gateway):
    main = Agent(gateway.session, "[[reply:m1]][[reply2:m2]][[reply3:m3]]", "You lead.")
    helper = Agent(gateway.session, "[[reply:h1]][[reply2:h2]]", "You help.")
    await main.ask()
    await asyncio.gather(main.ask(said("user", "go on")), helper.ask())
    assert [await helper.ask(said("user", "go on")), await main.ask(said("user", "go on"))] == ["h2", "m3"]
    buffer = gateway.memory.validated()
    assert (len(buffer.segments), buffer.fidelity) == (2, Fidelity.SEGMENTED)
    opened = [(c.opened_by, c.parent_segment) for c in gateway.memory.calls if c.opened_by]
    assert opened == [("start", None), ("subagent", None)]
    assert sorted(c.text for c in gateway.memory.calls if c.segment == 0) == ["m1", "m2", "m3"]


async def test_compaction_begins_a_segment_that_branches_off(gateway):
    agent = Agent(gateway.session, "[[reply:one]][[reply2:two]][[reply3:three]]", "Be brief.")
    await agent.ask()
    await agent.ask(said("user", "more"))
    agent.messages[2:] = [said("user", "So far: one, two.")]
    await agent.ask()
    assert [(c.segment, c.opened_by, c.parent_segment) for c in gateway.memory.calls] == [
        *[(0, "start", None), (0, "", None), (1, "edited", 0)]
    ]
    assert next(m.content for m in gateway.memory.messages if m.turn == 2) == "So far: one, two."  # the rest is known
    gateway.memory.validated()


async def test_a_request_that_is_made_again_is_a_sibling(gateway):
    agent = Agent(gateway.session, "[[reply:one]][[reply2:two]]")
    await agent.ask()
    again = [*agent.messages, said("user", "more")]
    first, second, third = [await gateway.session.reply(request(*again)) for _ in range(3)]
    assert first.record.segment == 0
    assert [(r.record.segment, r.record.opened_by, r.record.parent_segment) for r in (second, third)] == [
        *[(1, "sibling", 0), (2, "sibling", 0)]
    ]
    prompts = gateway.memory.prompts
    assert prompts[1] == prompts[2] == prompts[3]
    assert [m.role for m in gateway.memory.messages] == ["user", "assistant", "user", *["assistant"] * 3]
    gateway.memory.validated()


async def test_results_that_change_places_are_another_prompt(gateway):
    first = await gateway.session.reply(request(said("user", f"[[reply:{calls('a')}{calls('b')}]]"), tools=(TOOL,)))
    reply = first.told.message()
    ids = [call["id"] for call in reply["tool_calls"]]
    for order in (ids, ids[::-1]):
        results: list[ChatMessage] = [
            {"role": "tool", "content": text, "tool_call_id": id_} for text, id_ in zip(("one", "other"), order, strict=True)
        ]
        messages = (said("user", f"[[reply:{calls('a')}{calls('b')}]]"), reply, *results)
        await gateway.session.reply(request(*messages, tools=(TOOL,)))
    assert {c.output for c in gateway.memory.tool_calls} == {"one", "other"}
    assert [c.opened_by for c in gateway.memory.calls] == ["start", "", "sibling"]
    assert len({c.conversation_key for c in gateway.memory.calls}) == 3


async def test_a_raw_prompt_does_not_decide_how_chats_are_told(gateway):
    async for _ in gateway.session.stream(ModelRequest(dialect="test", model="m", prompt="Write on: <think>")):
        pass
    told = [event async for event in gateway.session.stream(request(said("user", "[[reply:plain words]]")))][-1].reply.told
    assert (told.content, told.reasoning) == ("plain words", "")


def thinking_first(messages, add_generation_prompt: bool) -> str:
    return chatml(messages, add_generation_prompt) + ("<think>\n" if add_generation_prompt else "")


async def test_reasoning_that_the_prompt_began_is_told_as_such_also_when_it_is_cut():
    async with ScriptedServer(template=thinking_first) as server, open_session(server) as gateway:
        reply = await gateway.session.reply(request(said("user", "[[reply:so many thoughts]][[length]]")))
        assert (reply.told.content, reply.told.reasoning, reply.ending) == ("", "so many thoughts", "length")


def test_of_named_conversations_the_newest_are_kept():
    kept = RememberedConversations()
    for number in range(5):
        kept.add(str(number), (said("user", "x" * 10_000_000),))
    assert list(kept) == ["2", "3", "4"]
    kept.add("large", (said("user", "x" * 40_000_000),))
    assert list(kept) == ["large"]


async def test_parallel_tries_from_one_reply_keep_its_sampled_ids(gateway):
    agent = Agent(gateway.session, "[[reply:one two three]][[delay2:0.05]]")
    await agent.ask()
    replies = await asyncio.gather(
        *(gateway.session.reply(request(*agent.messages, said("user", f"try {number}"))) for number in range(4))
    )
    buffer = gateway.memory.validated()
    assert len(buffer.segments) == 4
    first = gateway.memory.calls[0]
    start = first.context_ids + first.sampled_ids
    assert all(prompt[: len(start)] == start for prompt in gateway.memory.prompts[1:])
    assert sorted(r.record.turn for r in replies) == [1, 2, 3, 4]
    assert len({m.content for m in gateway.memory.messages if m.role == "user"}) == 5


async def test_other_tools_are_another_prompt(gateway):
    agent = Agent(gateway.session, "[[reply:one]][[reply2:two]][[reply3:three]]")
    await agent.ask(tools=(TOOL,))
    await agent.ask(said("user", "more"), tools=(TOOL,))
    await agent.ask(said("user", "and without"))
    assert [(c.segment, c.opened_by, c.parent_segment) for c in gateway.memory.calls] == [
        *[(0, "start", None), (0, "", None), (1, "edited", 0)]
    ]
    gateway.memory.validated()


async def test_a_cut_reply_is_continued_in_a_new_segment(gateway):
    agent = Agent(gateway.session, "[[reply:one two three four five]][[length1]]")
    await agent.ask()
    await agent.ask(said("user", "go on"))
    assert [(c.opened_by, c.parent_segment) for c in gateway.memory.calls] == [("start", None), ("cut", 0)]
    gateway.memory.validated()


async def test_a_template_that_drops_reasoning_begins_a_new_segment():
    async with ScriptedServer(template=chatml_dropping_reasoning) as server, serve(server) as gateway:
        agent = Agent(gateway.session, "[[reply:<think>\nhm\n</think>\n\nYes.]][[reply2:No.]]")
        await agent.ask()
        await agent.ask(said("user", "go on"))
    assert [(c.opened_by, c.parent_segment) for c in gateway.memory.calls] == [("start", None), ("template", 0)]
    gateway.memory.validated()


async def test_without_ids_it_is_text_only(gateway, server):
    server.switches.omit_token_ids = True
    agent = Agent(gateway.session, "[[reply:one]][[reply2:two]]")
    await agent.ask()
    await agent.ask(said("user", "more"))
    assert gateway.session.fidelity is Fidelity.TEXT_ONLY
    assert [c.opened_by for c in gateway.memory.calls] == ["start", "no_ids"]
    trained = replace(server.address(), features=frozenset({Feature.TOKEN_IDS, Feature.ID_PROMPTS}))
    async with serve(server, route=FixedRoute(trained)) as strict:
        answer = await _post(strict, "hello")
        assert answer.status_code == 503 and strict.session.failure is not None and not strict.memory.records


async def test_a_server_that_takes_only_messages_gets_them(server):
    address = replace(server.address(), features=frozenset({Feature.CHAT_TOOLS}))
    async with serve(server, route=FixedRoute(address)) as gateway:
        agent = Agent(gateway.session, "[[reply:one]][[reply2:two]]")
        assert [await agent.ask(tools=(TOOL,)), await agent.ask(said("user", "more"), tools=(TOOL,))] == ["one", "two"]
        events = [event async for event in gateway.session.stream(request(said("user", "[[reply:three]]")))]
        assert [type(event).__name__ for event in events] == ["TextDelta", "Finished"]
        assert gateway.session.fidelity is Fidelity.TEXT_ONLY
        assert [c.opened_by for c in gateway.memory.calls] == ["start", "no_ids", "subagent"]
        gateway.memory.validated()
        with pytest.raises(CallRefused, match="no raw prompts"):
            await gateway.session.reply(request(prompt="hi"))
    assert server.rendered == 0


async def test_a_session_goes_on_where_another_process_left_it(gateway, server):
    agent = Agent(gateway.session, f"[[reply:{calls('ls')}]][[reply2:two]][[reply3:three]]")
    await agent.ask(tools=(TOOL,))
    result: ChatMessage = {
        "role": "tool",
        "content": "a b",
        "tool_call_id": agent.messages[-1]["tool_calls"][0]["id"],
    }
    await agent.ask(result, tools=(TOOL,))
    memory = gateway.memory
    other = AgentSession(gateway.client, FixedRoute(server.address()), memory, sampling=Sampling(), call_timeout=20, model="m")
    other.restore(memory.calls, next_message=len(memory.messages))
    assert other.calls == 2
    agent.session = other
    assert await agent.ask(said("user", "more"), tools=(TOOL,)) == "three"
    again = await other.reply(request(*agent.messages[:1], tools=(TOOL,)))
    assert (again.record.opened_by, again.record.parent_segment) == ("sibling", 0)
    assert [c.segment for c in memory.calls] == [0, 0, 0, 1]
    assert [m.content for m in memory.messages if m.turn == 2] == ["more", "three"]
    memory.validated()


async def test_closing_ends_what_is_under_way_and_takes_no_more(gateway, server):
    waiting = asyncio.create_task(_post(gateway, "[[delay:60]]"))
    await _until(lambda: server.running == 1)
    await gateway.session.close(SessionClosed("the time is up"))
    answer = await waiting
    assert (answer.status_code, answer.json()["error"]["message"]) == (403, "the time is up")
    await _until(lambda: server.running == 0)
    assert (await _post(gateway, "hello")).status_code == 403
    assert gateway.memory.records == []


async def test_what_came_of_a_call_is_unknown_where_the_agent_ends_with_it(gateway):
    agent = Agent(gateway.session, f"[[reply:{calls('ls')}]][[reply2:{calls('submit')}]]")
    await agent.ask(tools=(TOOL,))
    result: ChatMessage = {"role": "tool", "content": "a b", "tool_call_id": agent.messages[-1]["tool_calls"][0]["id"]}
    await agent.ask(result, tools=(TOOL,))
    await gateway.session.close()
    assert [(c.turn, c.arguments["command"], c.output, bool(c.error)) for c in gateway.memory.tool_calls] == [
        *[(0, "ls", "a b", False), (1, "submit", "", True)]
    ]


async def test_a_client_that_goes_away_while_its_reply_is_stored_spoils_nothing(server):
    class Slow(Memory):
        async def turn(self, record: TurnRecord) -> None:
            entered.set()
            await go_on.wait()
            await super().turn(record)

    entered, go_on, memory = asyncio.Event(), asyncio.Event(), Slow()
    async with serve(server, recorder=memory) as gateway:
        agent = Agent(gateway.session, "[[reply:one]][[reply2:two]][[reply3:three]]")
        go_on.set()
        await agent.ask()
        go_on.clear()
        entered.clear()
        leaving = asyncio.create_task(gateway.session.reply(request(*agent.messages, said("user", "more"))))
        await entered.wait()
        leaving.cancel()
        waiting = asyncio.create_task(agent.ask(said("user", "other")))
        go_on.set()
        await waiting
        await gateway.session.close()
    assert [c.segment for c in memory.calls] == [0, 0, 1]
    memory.validated()


async def test_an_attempt_that_is_over_closes_its_session(server):
    class Superseded(Memory):
        async def turn(self, record: TurnRecord) -> None:
            raise AttemptSuperseded("attempt 1 is not current any more")

    async with serve(server, recorder=Superseded()) as gateway:
        assert (await _post(gateway, "hello")).status_code == 403
        with pytest.raises(SessionClosed):
            await gateway.session.reply(request(said("user", "hello")))


async def test_nothing_follows_a_call_that_may_not_be_stored(server):
    class Broken(Memory):
        async def turn(self, record: TurnRecord) -> None:
            raise OSError("disk full: /secret/path")

    async with serve(server, recorder=Broken()) as gateway:
        answer = await _post(gateway, "hello")
        assert answer.status_code == 500 and "secret" not in answer.text
        assert (await _post(gateway, "hello")).status_code == 403


@pytest.mark.parametrize("max_calls", [None, 1])
async def test_nor_do_calls_that_were_made_at_the_same_time(server, max_calls):
    class AnswerLost(Memory):
        async def turn(self, record: TurnRecord) -> None:
            self.records.append(record)
            await asyncio.sleep(0)
            raise OSError("the connection broke at the commit")

    memory = AnswerLost()
    async with open_session(server, recorder=memory, max_calls=max_calls) as gateway:
        asked = [gateway.session.reply(request(said("user", f"[[reply:{number}]]"))) for number in range(3)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert [call.turn for call in memory.calls] == [0]
    assert not any(isinstance(outcome, Reply) for outcome in outcomes)


@pytest.mark.parametrize("error", [SessionMoved("come again"), CallRefused(Kind.NO_SERVER, "come again", retry_after=1)])
async def test_calls_beside_one_that_another_process_is_to_store_can_be_made_again_too(server, error):
    class Moved(Memory):
        async def turn(self, record: TurnRecord) -> None:
            raise error

    async with open_session(server, recorder=Moved()) as gateway:
        under_way = asyncio.create_task(gateway.session.reply(request(said("user", "[[delay:60]]"))))
        await _until(lambda: server.running == 1)
        asked = [gateway.session.reply(request(said("user", f"[[reply:{number}]]"))) for number in range(2)]
        assert await asyncio.gather(*asked, return_exceptions=True) == [error, error]
        await gateway.session.close(SessionMoved("served elsewhere"))
        with pytest.raises(SessionMoved, match="served elsewhere"):
            await under_way


async def test_a_client_that_goes_away_stops_the_model(gateway, server):
    waiting = asyncio.create_task(_post(gateway, "[[delay:60]]"))
    await _until(lambda: server.running == 1)
    waiting.cancel()
    await _until(lambda: server.aborted == 1)
    assert (await _post(gateway, "hello")).status_code == 200
    assert len(gateway.memory.calls) == 1


class TwoVersions:
    """A route whose first call is cut by a weight update once `update` is set."""

    only_version = None

    def __init__(self, server: ScriptedServer) -> None:
        self.server = server.address(policy_version=7)
        self.update = asyncio.Event()

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[ServerAddress]:
        if self.update.is_set():
            yield self.server
            return
        cut = asyncio.timeout(None)
        watching = asyncio.create_task(self.update.wait())
        watching.add_done_callback(lambda _: cut.reschedule(0))
        try:
            async with cut:
                yield self.server
        except TimeoutError as error:
            self.server = replace(self.server, policy_version=8)
            raise CallCut from error
        finally:
            watching.cancel()


async def test_a_stream_that_is_left_after_new_weights_tells_both_versions():
    async with ScriptedServer(token_delay=0.02) as server:
        route = TwoVersions(server)
        async with open_session(server, route=route) as gateway:
            words = "ordinary words, so that the reply is long enough to be left in the middle of it"
            events = gateway.session.stream(request(said("user", f"[[reply:{words * 5}]]")))
            await anext(events)
            route.update.set()
            await _until(lambda: route.server.policy_version == 8)
            for _ in range(5):
                await anext(events)
            await events.aclose()
            (call,) = gateway.memory.calls
    assert call.finish_reason == "abort"
    assert [span.version for span in call.version_spans] == [7, 8]
    assert (call.policy_version, call.policy_version_last) == (7, 8)
    gateway.memory.validated()


async def test_a_stream_that_is_left_while_weights_change_under_it_is_not_stored():
    async with ScriptedServer(token_delay=0.02) as server:
        route = FixedRoute(server.address(policy_version=7))
        async with open_session(server, route=route) as gateway:
            events = gateway.session.stream(request(said("user", "[[reply:ordinary words, and some more of them]]")))
            await anext(events)
            route.server = server.address(policy_version=8)
            await events.aclose()
            assert not gateway.memory.records


async def test_more_calls_at_once_than_allowed_are_put_off(server):
    async with serve(server, max_concurrent=1) as gateway:
        waiting = asyncio.create_task(_post(gateway, "[[delay:60]]"))
        await _until(lambda: server.running == 1)
        answer = await _post(gateway, "hello")
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
        waiting.cancel()


async def test_a_session_has_so_many_replies_however_many_are_asked_for_at_once(server):
    exhausted = asyncio.Event()
    async with open_session(server, max_calls=3, on_exhausted=exhausted.set) as gateway:
        asked = [gateway.session.reply(request(said("user", f"[[reply:{number}]][[delay:0.05]]"))) for number in range(20)]
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(outcome, Reply) for outcome in outcomes) == len(gateway.memory.calls) == 3
        assert [str(o) for o in outcomes if not isinstance(o, Reply)] == ["all of the 3 model calls were made"] * 17
        assert exhausted.is_set()
        await gateway.session.count_tokens(request(said("user", "hi")))


async def test_a_call_that_comes_to_nothing_leaves_its_place_to_another(server):
    exhausted = asyncio.Event()
    async with open_session(server, max_calls=1, on_exhausted=exhausted.set) as gateway:
        left = asyncio.create_task(gateway.session.reply(request(said("user", "[[delay:60]]"))))
        await _until(lambda: server.running == 1)
        waiting = asyncio.create_task(gateway.session.reply(request(said("user", "[[reply:yes]]"))))
        left.cancel()
        assert (await waiting).told.content == "yes" and not exhausted.is_set()
        with pytest.raises(SessionClosed):
            await gateway.session.reply(request(said("user", "more")))
        assert exhausted.is_set() and len(gateway.memory.calls) == 1


async def test_a_reply_that_was_left_in_the_middle_counts():
    async with ScriptedServer(token_delay=0.02) as server, open_session(server, max_calls=1) as gateway:
        events = gateway.session.stream(request(said("user", "[[reply:ordinary words, and some more of them]]")))
        await anext(events)
        await events.aclose()
        with pytest.raises(SessionClosed):
            await gateway.session.reply(request(said("user", "more")))
        assert [call.finish_reason for call in gateway.memory.calls] == ["abort"]


async def _post(gateway: Gateway, text: str) -> httpx.Response:
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as client:
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        return await client.post(f"{gateway.url}/v1/chat/completions", json=body)


async def _until(condition) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)
