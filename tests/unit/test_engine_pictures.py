"""The shipped agent with a model that sees: which pictures it is shown, what it reads of them, and what is recorded."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rollouts.engine.agent import Agent, AgentSettings
from rollouts.engine.records import MessageRecord, TurnRecord
from rollouts.engine.tools import PythonTool, Tool, ToolArguments, ToolResult
from rollouts.engine.tools.pictures import MAX_ROLLOUT_BYTES
from rollouts.lifecycle import Cause, Fidelity
from rollouts.llm.buffer import validate
from rollouts.llm.capabilities import Feature
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.errors import ModelError
from rollouts.llm.pictures import MAX_PIXELS, picture_message
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.errors import BadRequest
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.scripted.template import chatml
from rollouts.llm.scripted.tokenizer import PICTURE
from rollouts.llm.types import ChatMessage, Sampling, ServerAddress
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.protocol import Picture, SandboxSpec
from tests.pictures import png

RED, BLUE, GREEN = png(40, 30, (255, 0, 0)), png(20, 60, (0, 0, 255)), png(8, 8, (0, 255, 0))
SVG = Picture("image/svg+xml", b"<svg xmlns='http://www.w3.org/2000/svg'/>")
BROKEN = Picture("image/png", b"\x89PNG\r\n\x1a\n...")
REFUSED = "the model server does not take such a picture, or no more of them"
CUT_OFF = Picture("image/png", RED.data[:-20])  # says how large it is, and cannot be decoded
HUGE = Picture("image/png", RED.data[:16] + (20_000).to_bytes(4, "big") * 2 + RED.data[24:])


class DrawArguments(ToolArguments):
    """None."""


class DrawTool:
    """Displays the same pictures at every call."""

    name = "draw"
    description = "Draw."
    arguments = DrawArguments
    code_argument = None

    def __init__(self, *pictures: Picture) -> None:
        self._pictures = pictures

    async def call(self, arguments: DrawArguments, *, timeout: float) -> ToolResult:
        return ToolResult("drawn", pictures=self._pictures)


@dataclass
class Recording:
    """A store in memory. `then` is done after each turn."""

    turns: list[TurnRecord] = field(default_factory=list)
    then: Any = None

    async def turn(self, record: TurnRecord) -> None:
        self.turns.append(record)
        if self.then is not None:
            self.then()

    def messages(self, role: str) -> list[MessageRecord]:
        return [message for turn in self.turns for message in turn.messages if message.role == role]


@dataclass
class Stage:
    """Plays one rollout, and holds what is recorded to the model's ids."""

    address: ServerAddress
    client: ModelClient
    recording: Recording = field(default_factory=Recording)

    async def play(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = (), **settings: Any) -> Conversation:
        route = FixedRoute(self.address)
        conversation = Conversation(self.client, route, Sampling(max_tokens=400), call_timeout=30.0)
        self.recording.then = self.recording.then and (lambda move=self.recording.then: move(route))
        termination = await Agent(conversation, tools, AgentSettings(**settings), self.recording).run(messages)
        assert termination.cause is Cause.COMPLETED
        calls = [turn.model_call for turn in self.recording.turns if turn.model_call is not None]
        placed = [place.digest for segment in validate(calls).segments for place in segment.placed]
        assert placed == [picture.digest for turn in self.recording.turns for m in turn.messages for picture in m.pictures]
        assert conversation.fidelity is Fidelity.TOKEN_EXACT
        return conversation

    def told(self, role: str = "tool") -> list[str]:
        return [message.content for message in self.recording.messages(role)]

    def shown(self, role: str = "tool") -> list[tuple[Picture, ...]]:
        return [message.pictures for message in self.recording.messages(role)]


@pytest.fixture
async def client() -> AsyncIterator[ModelClient]:
    client = ModelClient()
    yield client
    await client.close()


@pytest.fixture
async def stage(client: ModelClient) -> AsyncIterator[Stage]:
    async with ScriptedServer(pictures=True) as server:
        yield Stage(server.address(features=[Feature.GENERATE]), client)


@pytest.fixture
async def blind(client: ModelClient) -> AsyncIterator[Stage]:
    async with ScriptedServer() as server:
        yield Stage(server.address(features=[Feature.GENERATE]), client)


def call(tool: str = "draw", **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def asks(*replies: str) -> list[ChatMessage]:
    """A question that has the model say these replies."""
    script = "".join(f"[[reply{number}:{reply}]]" for number, reply in enumerate(replies, 1))
    return [{"role": "user", "content": script}]


async def test_pictures_of_a_prompt_are_shown_and_recorded(stage: Stage) -> None:
    conversation = await stage.play([picture_message("What is this? [[reply:Two colours.]]", RED, BLUE)])
    assert stage.shown("user") == [(RED, BLUE)]
    assert stage.told("user") == ["What is this? [[reply:Two colours.]]"]
    assert [part["type"] for part in conversation.messages[0]["parts"]] == ["text", "picture", "picture"]


@pytest.mark.parametrize("role", ["tool", "user"])
async def test_pictures_of_a_tool_come_after_its_text(stage: Stage, role: Any) -> None:
    conversation = await stage.play(asks(call(), "seen"), [DrawTool(RED, BLUE)], tool_result_role=role)
    assert stage.shown(role)[-1] == (RED, BLUE)
    assert stage.told(role)[-1] == "drawn\n[pictures shown: 2 image/png]"
    assert [part["type"] for part in conversation.messages[2]["parts"]] == ["text", "picture", "picture"]
    assert stage.recording.turns[0].tool_calls[0].pictures == (RED, BLUE)


async def test_pictures_in_every_turn_are_one_sequence(stage: Stage) -> None:
    prompt = picture_message(asks(call() * 2, call(), "done")[0]["content"], GREEN)
    await stage.play([prompt], [DrawTool(RED, RED)])
    assert stage.shown() == [(RED, RED)] * 3


async def test_a_model_of_text_is_told_of_them(blind: Stage) -> None:
    await blind.play(asks(call(), "fine"), [DrawTool(RED, SVG, BLUE)])
    assert blind.shown() == [()]
    assert blind.told() == ["drawn\n[pictures displayed, kept but not shown here: 2 image/png, 1 image/svg+xml]"]
    assert blind.recording.turns[0].tool_calls[0].pictures == (RED, SVG, BLUE)


@pytest.mark.parametrize(
    ("displayed", "settings", "shown", "said"),
    [
        ((SVG, RED), {}, (RED,), "1; the data is of none of the types image/png"),
        ((BROKEN, RED), {}, (RED,), "1; the data begins as image/png does, but does not say how large the picture is"),
        ((HUGE, RED, HUGE), {}, (RED,), f"2; the picture has 20000 x 20000 pixels, and at most {MAX_PIXELS} are shown"),
        ((RED,) * 7, {}, (RED,) * 4, "3; at most 4 are shown with a result"),
        ((RED, BLUE), {"max_result_pictures": 1}, (RED,), "1; at most 1 are shown with a result"),
        ((RED,), {"max_result_pictures": 0}, (), "1 image/png]"),
    ],
    ids=["svg", "broken", "huge", "many", "few", "none"],
)
async def test_what_cannot_be_shown_is_said(
    stage: Stage, displayed: tuple[Picture, ...], settings: dict[str, Any], shown: tuple[Picture, ...], said: str
) -> None:
    await stage.play(asks(call(), "fine"), [DrawTool(*displayed)], **settings)
    assert stage.shown() == [shown]
    assert f"[pictures displayed, kept but not shown here: {said}" in stage.told()[0]
    assert ("[pictures shown: " in stage.told()[0]) == bool(shown)


async def test_a_picture_is_what_its_data_says(stage: Stage) -> None:
    await stage.play(asks(call(), "fine"), [DrawTool(Picture("image/jpeg", RED.data))])
    assert stage.shown() == [(RED,)]


async def test_a_rollout_shows_so_many_bytes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(RED.data) * 3 < MAX_ROLLOUT_BYTES
    monkeypatch.setattr("rollouts.engine.tools.pictures.MAX_ROLLOUT_BYTES", len(RED.data) * 2 + 1)
    await stage.play(asks(call(), call(), call(), "fine"), [DrawTool(RED)])
    assert stage.shown() == [(RED,), (RED,), ()]
    assert "kept but not shown here: 1; those shown before leave room for 1 bytes]" in stage.told()[2]


async def test_a_picture_that_the_server_refuses_ends_nothing(stage: Stage) -> None:
    cut_off = Picture("image/png", RED.data[:-20])  # says how large it is, and cannot be decoded
    await stage.play(asks(call(), "fine"), [DrawTool(cut_off, RED, BLUE)], max_result_pictures=2)
    assert stage.shown() == [(RED,)]
    assert f"kept but not shown here: 1; {REFUSED}]" in stage.told()[0]


async def test_a_server_is_asked_about_few_bad_pictures(client: ModelClient) -> None:
    async with ScriptedServer(pictures=True) as server:
        stage = Stage(server.address(features=[Feature.GENERATE]), client)
        await stage.play(asks(call(), "fine"), [DrawTool(*[CUT_OFF] * 50)], max_result_pictures=2)
        assert server.rendered < 10
    assert f"kept but not shown here: 2; {REFUSED}]" in stage.told()[0]
    assert "kept but not shown here: 48; at most 2 are shown with a result]" in stage.told()[0]


class EndingTool(DrawTool):
    """Displays pictures and exceeds a limit of its sandbox."""

    async def call(self, arguments: DrawArguments, *, timeout: float) -> ToolResult:
        return ToolResult("", limit_exceeded="memory_mb", pictures=self._pictures)


async def test_no_server_is_asked_about_what_ends_a_rollout(client: ModelClient) -> None:
    """If it failed then, that would become the reason."""
    async with ScriptedServer(pictures=True) as server:
        route = FixedRoute(server.address(features=[Feature.GENERATE]))
        conversation = Conversation(client, route, Sampling(max_tokens=400), call_timeout=30.0)
        agent = Agent(conversation, [EndingTool(RED)], AgentSettings(), Recording())
        assert (await agent.run(asks(call()))).cause is Cause.SANDBOX_LIMIT
        assert server.rendered == 1  # the question


async def test_a_server_that_takes_no_more_pictures_ends_nothing(client: ModelClient) -> None:
    """As with `--limit-mm-per-prompt`: each alone would be taken."""

    def at_most_three(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        if sum(message["content"].count(PICTURE) for message in messages) > 3:
            raise BadRequest("At most 3 image(s) may be provided in one prompt. (parameter=image)")
        return chatml(messages, add_generation_prompt)

    async with ScriptedServer(pictures=True, template=at_most_three) as server:
        stage = Stage(server.address(features=[Feature.GENERATE]), client)
        prompt = picture_message(asks(call(), call(), "fine")[0]["content"], GREEN)
        await stage.play([prompt], [DrawTool(RED, BLUE, RED)])
    assert stage.shown() == [(RED, BLUE), ()]
    assert f"kept but not shown here: 1; {REFUSED}]" in stage.told()[0]
    assert f"kept but not shown here: 3; {REFUSED}]" in stage.told()[1]


async def test_a_picture_that_is_too_large_for_a_request_ends_nothing(
    client: ModelClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollouts.llm.scripted.server.MAX_BODY", 8_000)
    large = Picture("image/jpeg", b"\xff\xd8\xff\xc0\x00\x11\x08\x00\x0b\x00\x0a\x03" + bytes(8_000))
    async with ScriptedServer(pictures=True) as server:
        stage = Stage(server.address(features=[Feature.GENERATE]), client)
        await stage.play(asks(call(), "fine"), [DrawTool(large, RED)])
    assert stage.shown() == [(RED,)]
    assert f"kept but not shown here: 1; {REFUSED}]" in stage.told()[0]


async def test_a_template_without_a_place_for_what_tools_show_ends_nothing(client: ModelClient) -> None:
    """As Llama 3.2's, which writes tool results as JSON."""

    def of_users(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
        texts = [m["content"].replace(PICTURE, "") if m["role"] == "tool" else m["content"] for m in messages]
        plain = [ChatMessage(role=m["role"], content=text) for m, text in zip(messages, texts, strict=True)]
        return chatml(plain, add_generation_prompt)

    async with ScriptedServer(pictures=True, template=of_users) as server:
        stage = Stage(server.address(features=[Feature.GENERATE]), client)
        await stage.play([picture_message(asks(call(), "fine")[0]["content"], GREEN)], [DrawTool(RED)])
        assert stage.shown() == [()]
        assert f"kept but not shown here: 1; {REFUSED}]" in stage.told()[0]
        by_user = Stage(stage.address, client)
        await by_user.play(asks(call(), "fine"), [DrawTool(RED)], tool_result_role="user")
        assert by_user.shown("user")[-1] == (RED,)


async def test_a_rollout_that_has_seen_needs_a_server_that_sees(stage: Stage, blind: Stage) -> None:
    """Another attempt may get one."""
    stage.recording.then = lambda route: setattr(route, "server", blind.address)
    with pytest.raises(ModelError, match="takes no") as raised:
        await stage.play(asks(call(), "fine"), [DrawTool(RED)])
    assert raised.value.retryable
    assert stage.shown() == [(RED,)]


async def test_a_rollout_goes_on_at_another_server_that_sees(stage: Stage) -> None:
    async with ScriptedServer(pictures=True) as other:
        stage.recording.then = lambda route: setattr(route, "server", other.address(features=[Feature.GENERATE]))
        await stage.play(asks(call(), call(), "fine"), [DrawTool(RED)])
        assert other.finished == 2
    assert stage.shown() == [(RED,), (RED,)]


async def test_a_figure_drawn_in_a_sandbox_is_seen(stage: Stage, tmp_path: Path) -> None:
    backend = BubblewrapBackend(tmp_path)
    await backend.start("x", SandboxSpec())
    session = await backend.connect("x")
    code = f"""\
class Figure:
    def _repr_png_(self): return bytes.fromhex("{BLUE.data.hex()}")
display(Figure())
print("drawn")
"""
    try:
        await stage.play(asks(call("python", code=code), "blue"), [PythonTool(session)])
    finally:
        await session.close()
        await backend.stop("x")
    assert stage.shown() == [(BLUE,)]
    assert stage.told() == ["drawn\n[pictures shown: 1 image/png]"]
