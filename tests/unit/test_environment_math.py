"""The math environment from problem to reward: a scripted model, a real sandbox, the real verifier."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rollouts.engine.deadlines import Deadline
from rollouts.engine.records import RunOutcome, ToolCallRecord, TurnRecord
from rollouts.engine.stages import eval_stage, init_stage, run_stage
from rollouts.environments import registry
from rollouts.environments.base import EvalContext, InitContext, RunContext
from rollouts.lifecycle import Cause
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.types import Sampling, ServerAddress
from sandboxes.backends.bubblewrap import BubblewrapBackend
from sandboxes.protocol import Session

ENV = registry.get("math")
CONFIG = registry.validate_config("math", {"max_turns": 4, "tool_timeout": 20})


class Recording:
    """A store in memory."""

    def __init__(self) -> None:
        self.turns: list[TurnRecord] = []

    async def turn(self, record: TurnRecord) -> None:
        self.turns.append(record)

    @property
    def tool_calls(self) -> list[ToolCallRecord]:
        return [call for turn in self.turns for call in turn.tool_calls]


@pytest.fixture
async def sandbox(tmp_path: Path) -> AsyncIterator[Session]:
    spec = ENV.sandbox_spec(CONFIG, None)
    assert spec is not None
    backend = BubblewrapBackend(tmp_path / "sandboxes")
    await backend.start("prorl-math-1", spec)
    session = await backend.connect("prorl-math-1")
    yield session
    await session.close()
    await backend.stop("prorl-math-1")


async def play(sandbox: Session, *replies: str) -> tuple[RunOutcome, Recording, float | None]:
    """Let a model give these replies to the problem whose answer is 9."""
    directives = "".join(f"[[reply{turn}:{reply}]]" for turn, reply in enumerate(replies, start=1))
    task = registry.validate_task("math", {"question": f"Integrate x^2 from 0 to 3. {directives}", "expected_answer": "9"})
    recording, client = Recording(), ModelClient()
    await init_stage(ENV, InitContext(CONFIG, task, sandbox), deadline=Deadline.after(30, "the test's time"))
    async with ScriptedServer() as server:
        address = ServerAddress(server.url, server.model, "policy", 0, 8192)
        conversation = Conversation(client, FixedRoute(address), Sampling(), call_timeout=30.0)
        outcome = await run_stage(
            ENV, RunContext(CONFIG, task, sandbox, conversation, recording), deadline=Deadline.after(60, "the test's time")
        )
        await client.close()
    score = await eval_stage(
        ENV, EvalContext(CONFIG, task, outcome.artefacts, None), deadline=Deadline.after(60, "the test's time")
    )
    return outcome, recording, score.total


def python(code: str) -> str:
    return f"<tool_call>{json.dumps({'name': 'python', 'arguments': {'code': code}})}</tool_call>"


async def test_a_problem_is_solved_with_the_lent_packages(sandbox: Session) -> None:
    code = "from sympy import integrate, Symbol\nx = Symbol('x')\nintegrate(x**2, (x, 0, 3))"
    outcome, recording, reward = await play(sandbox, python(code), "So it is \\boxed{\\frac{18}{2}}.")

    assert outcome.termination.cause is Cause.COMPLETED
    assert [(call.name, call.output, call.error) for call in recording.tool_calls] == [("python", "9", "")]
    assert reward == 1.0
    assert "<tools>" in recording.turns[0].messages[0].content


async def test_the_interpreter_remembers_and_reports_mistakes(sandbox: Session) -> None:
    _, recording, reward = await play(sandbox, python("n = 8"), "```python\nn + 1 / 0\n```", python("print(n)"), "\\boxed{8}")

    assert ["" if "Traceback" in call.output else call.output for call in recording.tool_calls] == ["", "", "8"]
    assert "ZeroDivisionError" in recording.tool_calls[1].output
    assert reward == 0.0


async def test_an_answer_outside_a_box_does_not_count(sandbox: Session) -> None:
    _, _, reward = await play(sandbox, "It is 9.")

    assert reward == 0.0


async def test_running_out_of_turns_is_scored(sandbox: Session) -> None:
    outcome, _, reward = await play(sandbox, *[f"\\boxed{{9}} {python('1')}"] * 5)

    assert outcome.termination.cause is Cause.MAX_TURNS
    assert reward == 1.0  # the text of the last reply is the final answer
