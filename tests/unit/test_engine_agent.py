"""The agent loop against a scripted model over real HTTP: every way to end, and what is recorded when it is cut short."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from pydantic import Field

import rollouts.engine.agent as agent_module
from rollouts.engine.agent import Agent, AgentSettings
from rollouts.engine.errors import AttemptSuperseded, EnvironmentFailed, StoreFailed
from rollouts.engine.records import TurnRecord
from rollouts.engine.tools import Tool, ToolArguments, ToolResult
from rollouts.lifecycle import Blame, Cause, Termination
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.errors import ModelError
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import Sampling, ServerAddress
from sandboxes.errors import SandboxLost
from sandboxes.protocol import Picture


class NumberArguments(ToolArguments):
    number: int = Field(ge=0)
    comment: str = ""


class DoublingTool:
    """A tool that can also wait for ever (`hold`) or raise (`fails_with`)."""

    name = "double"
    description = "Double a number."
    arguments = NumberArguments
    code_argument = None

    def __init__(self, result: ToolResult | None = None, fails_with: Exception | None = None, hold: bool = False) -> None:
        self.result = result
        self.fails_with = fails_with
        self.hold = hold
        self.called = asyncio.Event()
        self.calls: list[int] = []

    async def call(self, arguments: NumberArguments, *, timeout: float) -> ToolResult:
        self.calls.append(arguments.number)
        self.called.set()
        if self.fails_with is not None:
            raise self.fails_with
        if self.hold:
            await asyncio.Event().wait()
        return self.result or ToolResult(str(2 * arguments.number))


@dataclass
class Recording:
    """A store in memory."""

    turns: list[TurnRecord] = field(default_factory=list)
    fails_with: Exception | None = None
    hang: bool = False
    delay: float = 0.0
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    async def turn(self, record: TurnRecord) -> None:
        self.asked.set()
        await asyncio.sleep(self.delay)
        if self.hang:
            await asyncio.Event().wait()
        if self.fails_with is not None:
            raise self.fails_with
        self.turns.append(record)


@dataclass
class Stage:
    """What a test needs to play one rollout."""

    server: ScriptedServer
    client: ModelClient
    recording: Recording = field(default_factory=Recording)
    agent: Agent | None = None

    async def play(self, prompt: str, tools: Sequence[Tool] = (), *, max_model_len: int = 8192, **settings: Any) -> Termination:
        address = ServerAddress(self.server.url, self.server.model, "policy", 3, max_model_len)
        conversation = Conversation(self.client, FixedRoute(address), Sampling(max_tokens=400), call_timeout=30.0)
        self.agent = Agent(conversation, tools, AgentSettings(**settings), self.recording)
        return await self.agent.run([{"role": "system", "content": "Be brief."}, {"role": "user", "content": prompt}])

    @property
    def messages(self) -> list[tuple[str, str]]:
        return [(m.role, m.content) for turn in self.recording.turns for m in turn.messages]


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    client = ModelClient()
    async with ScriptedServer() as server:
        yield Stage(server, client)
        await client.close()


def call(number: object, name: str = "double") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': {'number': number}})}</tool_call>"


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_reply_without_a_call_is_the_final_answer(stage: Stage) -> None:
    termination = await stage.play("[[reply:The answer is 4.]]")

    assert termination.cause is Cause.COMPLETED
    assert stage.agent is not None and stage.agent.final_text == "The answer is 4."
    [turn] = stage.recording.turns
    assert [(m.index, m.turn, m.role) for m in turn.messages] == [(0, 0, "system"), (1, 0, "user"), (2, 0, "assistant")]
    assert turn.model_call is not None and turn.model_call.policy_version == 3


async def test_a_tool_call_is_run_and_its_result_shown(stage: Stage) -> None:
    termination = await stage.play(f"[[reply:Let me see. {call(21)}]][[reply2:It is 42.]]", [DoublingTool()])

    assert termination.cause is Cause.COMPLETED
    first, second = stage.recording.turns
    assert [(m.index, m.role, m.content, m.name) for m in first.messages[2:]] == [
        (2, "assistant", f"Let me see. {call(21)}", ""),
        (3, "tool", "42", "double"),
    ]
    assert [(m.index, m.role) for m in second.messages] == [(4, "assistant")]
    [tool_call] = first.tool_calls
    assert (tool_call.name, tool_call.arguments, tool_call.output, tool_call.error) == ("double", {"number": 21}, "42", "")
    assert tool_call.duration >= 0


async def test_calls_of_one_reply_run_in_order(stage: Stage) -> None:
    tool = DoublingTool()
    await stage.play(f"[[reply:{call(1)}{call(2)}{call(3)}]][[reply2:done]]", [tool])

    assert tool.calls == [1, 2, 3]
    assert [t.index for t in stage.recording.turns[0].tool_calls] == [0, 1, 2]
    assert [content for role, content in stage.messages if role == "tool"] == ["2", "4", "6"]


async def test_results_can_be_shown_as_user_messages(stage: Stage) -> None:
    await stage.play(f"[[reply:{call(1)}]][[reply2:done]]", [DoublingTool()], tool_result_role="user")

    assert ("user", "2") in stage.messages


@pytest.mark.parametrize(
    ("directive", "cause"), [("[[length]]", Cause.LENGTH), ("[[content_filter]]", Cause.REFUSAL)], ids=["length", "filter"]
)
async def test_a_reply_that_was_cut_ends_the_rollout(stage: Stage, directive: str, cause: Cause) -> None:
    tool = DoublingTool()
    termination = await stage.play(f"[[reply:So far {call(1)}]]{directive}", [tool])

    assert termination.cause is cause and termination.blame is Blame.POLICY
    assert tool.calls == []
    assert stage.agent is not None and stage.agent.final_text == "So far"
    assert len(stage.recording.turns) == 1


async def test_turns_run_out(stage: Stage) -> None:
    tool = DoublingTool()
    termination = await stage.play(f"[[reply:{call(1)}]][[reply2:{call(2)}]][[reply3:never asked]]", [tool], max_turns=2)

    assert termination.cause is Cause.MAX_TURNS
    assert tool.calls == [1, 2]  # what the policy asked for in its last turn is still done: it may be what is scored
    assert len(stage.recording.turns) == 2


async def test_a_first_prompt_that_does_not_fit_is_recorded(stage: Stage) -> None:
    termination = await stage.play("x" * 500, max_model_len=50)

    assert termination.cause is Cause.CONTEXT_OVERFLOW and termination.blame is Blame.POLICY
    [turn] = stage.recording.turns
    assert turn.model_call is None
    assert [m.role for m in turn.messages] == ["system", "user"]


async def test_a_tool_result_that_does_not_fit_any_more_is_recorded(stage: Stage) -> None:
    long = DoublingTool(ToolResult("y" * 4000))
    termination = await stage.play(f"[[reply:{call(1)}]]", [long], max_model_len=1000)

    assert termination.cause is Cause.CONTEXT_OVERFLOW
    assert stage.messages[-1] == ("tool", "y" * 4000)
    assert stage.recording.turns[-1].model_call is not None


MALFORMED = [
    pytest.param('<tool_call>{"name": "double", </tool_call>', "valid JSON", id="json"),
    pytest.param('<tool_call>{"name": "triple", "arguments": {}}</tool_call>', '"triple"', id="unknown tool"),
    pytest.param(call("many"), "integer", id="wrong type"),
]


@pytest.mark.parametrize(("reply", "said"), MALFORMED)
async def test_the_model_is_told_of_a_malformed_call(stage: Stage, reply: str, said: str) -> None:
    termination = await stage.play(f"[[reply:{reply}]][[reply2:{call(4)}]][[reply3:8]]", [DoublingTool()])

    assert termination.cause is Cause.COMPLETED
    complaint = stage.recording.turns[0].messages[-1]
    assert complaint.role == "tool" and complaint.content.startswith("Error: ") and said in complaint.content
    [failed] = stage.recording.turns[0].tool_calls
    assert failed.error in complaint.content


async def test_arguments_out_of_bounds_are_malformed(stage: Stage) -> None:
    tool = DoublingTool()
    termination = await stage.play(f"[[reply:{call(-1)}]]", [tool], max_malformed=1)

    assert termination.cause is Cause.MALFORMED_TOOL_CALL
    assert tool.calls == []
    assert "number" in stage.recording.turns[0].tool_calls[0].error


async def test_malformed_calls_in_a_row_end_the_rollout(stage: Stage) -> None:
    bad = "<tool_call>oops</tool_call>"
    replies = [bad, bad, call(1), bad, bad, bad, "never asked"]
    prompt = "".join(f"[[reply{turn}:{reply}]]" for turn, reply in enumerate(replies, start=1))
    termination = await stage.play(prompt, [DoublingTool()])

    assert termination.cause is Cause.MALFORMED_TOOL_CALL and termination.blame is Blame.POLICY
    assert len(stage.recording.turns) == 6  # the good third one starts the count again


async def test_a_tool_at_its_time_limit_is_a_result(stage: Stage) -> None:
    tool = DoublingTool(ToolResult("halfway\n", timed_out=True, truncated_bytes=7))
    termination = await stage.play(f"[[reply:{call(1)}]][[reply2:I give up.]]", [tool])

    assert termination.cause is Cause.COMPLETED
    text = next(content for role, content in stage.messages if role == "tool")
    assert text.startswith("halfway\n") and "time limit" in text and "7 bytes" in text
    assert stage.recording.turns[0].tool_calls[0].timed_out


async def test_a_tool_that_ignores_its_time_limit_is_broken(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_module, "_TOOL_GRACE_SECONDS", 0.05)
    with pytest.raises(EnvironmentFailed, match="ignored its time limit"):
        await stage.play(f"[[reply:{call(1)}]]", [DoublingTool(hold=True)], tool_timeout=0.05)


async def test_exceeding_a_limit_of_the_sandbox_is_how_the_policy_ended(stage: Stage) -> None:
    tool = DoublingTool(ToolResult("so far\n", limit_exceeded="memory_mb"))
    termination = await stage.play(f"[[reply:{call(1)}{call(2)}]][[reply2:never asked]]", [tool])

    assert termination.cause is Cause.SANDBOX_LIMIT and termination.blame is Blame.POLICY
    assert termination.detail.startswith("memory_mb: ") and "double" in termination.detail
    assert tool.calls == [1]
    [turn] = stage.recording.turns
    assert [t.limit_exceeded for t in turn.tool_calls] == ["memory_mb"]
    assert turn.messages[-1].content == "so far\n[ended for exceeding the sandbox's limit memory_mb]"


async def test_what_a_tool_says_and_shows_is_recorded(stage: Stage) -> None:
    picture = Picture("image/png", b"...")
    tool = DoublingTool(ToolResult("1\n", note="still running", running=True, pictures=(picture,)))
    await stage.play(f"[[reply:{call(1)}]][[reply2:done]]", [tool])

    [recorded] = stage.recording.turns[0].tool_calls
    assert (recorded.note, recorded.running, recorded.pictures) == ("still running", True, (picture,))
    told = "1\n[still running]\n[pictures displayed, kept but not shown here: 1 image/png]"
    assert ("tool", told) in stage.messages


async def test_the_model_sees_the_ends_of_long_output_and_how_much_was_cut(stage: Stage) -> None:
    tool = DoublingTool(ToolResult("a" * 600 + "b" * 600))
    await stage.play(f"[[reply:{call(1)}]][[reply2:ok]]", [tool], max_result_chars=200)

    text = next(content for role, content in stage.messages if role == "tool")
    assert text.startswith("a" * 100) and "b" * 100 in text and "1000 characters cut" in text
    assert len(text) < 300
    assert len(stage.recording.turns[0].tool_calls[0].output) == 1200


async def test_a_lost_sandbox_is_not_the_models_business(stage: Stage) -> None:
    with pytest.raises(SandboxLost):
        await stage.play(f"[[reply:{call(1)}]]", [DoublingTool(fails_with=SandboxLost("gone"))])

    [turn] = stage.recording.turns
    assert turn.model_call is not None
    assert [t.error for t in turn.tool_calls] == ["the rollout ended before the call returned"]
    assert turn.messages[-1].role == "assistant"


async def test_a_failing_model_leaves_what_it_was_asked(stage: Stage) -> None:
    with pytest.raises(ModelError):
        await stage.play("[[fail:400]]")

    assert [role for role, _ in stage.messages] == ["system", "user"]


async def test_an_aborted_generation_is_continued_from_its_ids(stage: Stage) -> None:
    """The server gives half of what is left each time: one reply of several parts."""
    await stage.play("[[reply:half of it and half of it]][[abort]]")
    [turn] = stage.recording.turns
    assert turn.model_call is not None
    assert turn.model_call.text == "half of it and half of it"
    assert stage.server.finished > 2


async def test_cancelled_in_a_model_call(stage: Stage) -> None:
    rollout = asyncio.create_task(stage.play("[[delay:30]]"))
    await until(lambda: stage.server.running == 1)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout

    [turn] = stage.recording.turns
    assert turn.model_call is None and [m.role for m in turn.messages] == ["system", "user"]
    await until(lambda: stage.server.aborted == 1)  # the server is not left to generate for nobody


async def test_cancelled_in_the_second_model_call_adds_no_empty_turn(stage: Stage) -> None:
    rollout = asyncio.create_task(stage.play(f"[[reply:{call(1)}]][[delay2:30]]", [DoublingTool()]))
    await until(lambda: stage.server.finished == 1 and stage.server.running == 1)
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout

    assert len(stage.recording.turns) == 1


async def test_cancelled_in_a_tool_call(stage: Stage) -> None:
    tool = DoublingTool(hold=True)
    rollout = asyncio.create_task(stage.play(f"[[reply:{call(7)}]]", [tool]))
    await tool.called.wait()
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout

    [turn] = stage.recording.turns
    assert turn.model_call is not None
    assert [(t.arguments, t.output, bool(t.error)) for t in turn.tool_calls] == [({"number": 7}, "", True)]


async def test_a_store_that_hangs_holds_up_a_cancelled_rollout_only_briefly(stage: Stage) -> None:
    stage.recording.hang = True
    rollout = asyncio.create_task(stage.play("[[delay:30]]"))
    await until(lambda: stage.server.running == 1)
    rollout.cancel()
    async with asyncio.timeout(5):
        with pytest.raises(asyncio.CancelledError):
            await rollout


async def test_a_turn_that_is_being_stored_is_stored_once(stage: Stage) -> None:
    stage.recording.delay = 0.1
    rollout = asyncio.create_task(stage.play("[[reply:4]]"))
    await stage.recording.asked.wait()
    rollout.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rollout

    assert [turn.model_call is not None for turn in stage.recording.turns] == [True]


async def test_a_store_that_fails_stops_the_rollout(stage: Stage) -> None:
    stage.recording.fails_with = ConnectionError("database is down")
    with pytest.raises(StoreFailed, match="database is down"):
        await stage.play("[[reply:4]]")


async def test_a_store_that_fails_does_not_hide_why_a_rollout_was_cut_short(stage: Stage) -> None:
    stage.recording.fails_with = ConnectionError("database is down")
    with pytest.raises(ModelError):
        await stage.play("[[fail:400]]")


async def test_a_superseded_attempt_stops(stage: Stage) -> None:
    stage.recording.fails_with = AttemptSuperseded("attempt 2 owns it")
    with pytest.raises(AttemptSuperseded):
        await stage.play("[[reply:4]]")
