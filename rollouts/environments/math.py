r"""Competition problems with a Python tool. The final answer stands in \boxed{} and is judged by math-verify."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from rollouts.engine.agent import Agent, AgentSettings
from rollouts.engine.budget import BudgetTool
from rollouts.engine.errors import EnvironmentFailed
from rollouts.engine.tools import PythonTool, Tool, describe_tools
from rollouts.environments.base import (
    ANSWER,
    EnvironmentConfig,
    EvalContext,
    InitContext,
    RewardComponent,
    RunContext,
    Score,
    TaskPayload,
)
from rollouts.environments.python_packages import packages_binds, packages_env
from rollouts.environments.sandbox_settings import SandboxSettings
from rollouts.lifecycle import Termination
from rollouts.llm.types import ChatMessage
from rollouts.rewards.boxed import final_answer, unwrap
from rollouts.rewards.isolated import MAX_EXPRESSION_CHARS, shared_verifier
from sandboxes.protocol import SandboxSpec

_SYSTEM_PROMPT = (
    "Solve the mathematical problem. Reason step by step, and use the python tool for calculations. "
    "At the end, write the answer, and nothing else, inside \\boxed{}."
)


class MathConfig(EnvironmentConfig):
    """Settings of the math environment."""

    max_turns: int = Field(8, ge=1, le=100, description="Model calls per rollout.")
    tool_timeout: float = Field(30.0, gt=0, le=600, description="Seconds for one python call.")
    budget_tool: bool = Field(False, description="Offer a tool that tells the seconds, turns and tokens that are left.")
    system_prompt: str = Field(_SYSTEM_PROMPT, max_length=20_000, description="The description of the tool is added to it.")
    python_packages: tuple[str, ...] = Field(
        ("sympy", "mpmath"),
        max_length=20,
        description="Pure Python packages of the worker's installation that can be imported in the sandbox.",
    )
    sandbox: SandboxSettings = SandboxSettings()


class MathTask(TaskPayload):
    """One problem."""

    id: str = Field("", max_length=200)
    question: str = Field(min_length=1, max_length=100_000)
    expected_answer: str = Field(
        min_length=1, max_length=MAX_EXPRESSION_CHARS, description="LaTeX, with or without math delimiters."
    )


class Math:
    """Multi-turn problem solving, rewarded with 1 or 0."""

    config: ClassVar = MathConfig
    task: ClassVar = MathTask
    evaluates_in_sandbox: ClassVar = False

    def check_task(self, task: MathTask) -> None:
        """Raise ValueError when math-verify cannot parse the gold answer."""
        shared_verifier().check_gold(task.expected_answer)

    def sandbox_spec(self, config: MathConfig, task: MathTask) -> SandboxSpec | None:
        try:
            binds = packages_binds(config.python_packages)
        except ValueError as exc:
            raise EnvironmentFailed(str(exc)) from exc
        return config.sandbox.to_spec(binds=binds, env=packages_env(config.python_packages))

    async def initialize(self, ctx: InitContext) -> None:
        """Nothing to prepare: the sandbox is empty but for the packages."""

    async def run(self, ctx: RunContext) -> Termination:
        assert ctx.sandbox is not None  # noqa: S101 - sandbox_spec asks for one
        tools: list[Tool] = [PythonTool(ctx.sandbox)]
        if ctx.config.budget_tool:
            tools.append(BudgetTool(ctx.budget))
        settings = AgentSettings(max_turns=ctx.config.max_turns, tool_timeout=ctx.config.tool_timeout)
        agent = Agent(ctx.conversation, tools, settings, ctx.recorder, ctx.budget)
        prompt: list[ChatMessage] = [
            {"role": "system", "content": f"{ctx.config.system_prompt}\n\n{describe_tools(tools)}"},
            {"role": "user", "content": ctx.task.question},
        ]
        try:
            return await agent.run(prompt)
        finally:
            ctx.artefacts[ANSWER] = agent.final_text

    async def evaluate(self, ctx: EvalContext) -> Score:
        answer = final_answer(ctx.artefacts[ANSWER])
        if answer is None:
            return Score([RewardComponent("correct", 0.0, detail={"problem": "no \\boxed{} in the final reply"})])
        verdict = await shared_verifier().verify(ctx.task.expected_answer, answer)
        detail = {"expected": verdict["parsed_gold"], "answered": verdict["parsed_answer"]}
        return Score([RewardComponent("correct", float(verdict["correct"]), detail=detail)])

    def gold_answer(self, task: MathTask) -> str:
        return f"\\boxed{{{unwrap(task.expected_answer)}}}"
