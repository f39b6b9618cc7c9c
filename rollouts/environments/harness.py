"""Environments whose agent is a program in the sandbox, as it is, with a model URL of the gateway: what they have in common."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Awaitable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

from pydantic import Field

from rollouts.engine.budget import DEADLINE_VARIABLE
from rollouts.engine.errors import EnvironmentFailed, EvaluationFailed
from rollouts.environments.base import (
    ANSWER,
    EnvironmentConfig,
    EvalContext,
    InitContext,
    ModelAccess,
    RewardComponent,
    RunContext,
    Score,
    TaskPayload,
)
from rollouts.environments.sandbox_settings import SandboxSettings
from rollouts.environments.workspace import Workspace
from rollouts.lifecycle import Cause, Phase, Termination
from rollouts.rewards.boxed import final_answer, unwrap
from rollouts.rewards.isolated import MAX_EXPRESSION_CHARS, shared_verifier
from sandboxes.protocol import CommandResult, SandboxSpec, Session

# Artefacts, besides ANSWER.
EXIT_CODE, OUTPUT, PATCH, FILES, PROBLEMS = "exit_code", "output", "patch", "files", "problems"

FOLDER = "/tmp/prorl"  # noqa: S108 - the sandbox's own; what is ours and not the agent's work
INSTRUCTION_FILE = f"{FOLDER}/instruction.txt"
_OUTPUT_FILE = f"{FOLDER}/output.txt"

_KEEP_SECONDS = 15.0  # of the agent's time, to bring away what it has left; less of a short time
_KEEP_SHARE = 0.2
_OUTPUT_CHARS = 20_000  # the end of what the program printed
_DETAIL_CHARS = 300

Result = TypeVar("Result")

RelativePath = Annotated[str, Field(min_length=1, max_length=300, pattern=r"^[^/\x00][^\x00]*$")]
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", max_length=100)]
VariableText = Annotated[str, Field(pattern=r"^[^\x00]*$", max_length=10_000)]
FileText = Annotated[str, Field(max_length=1_000_000)]


class HarnessConfig(EnvironmentConfig):
    """Settings that all environments of programs have."""

    workdir: str = Field(
        "workspace", min_length=1, max_length=300, pattern=r"^[^\x00]+$", description="Where the agent works; below the home."
    )
    max_calls: int = Field(100, ge=1, le=10_000, description="Model calls per rollout.")
    patch: bool = Field(False, description="Keep what the agent changed in `workdir`, as a git patch; the image needs git.")
    collect: tuple[RelativePath, ...] = Field((), max_length=100, description="Files of `workdir` to keep.")
    answer_file: RelativePath = Field("answer.txt", description="The file of `workdir` that holds the agent's answer.")
    env: dict[Variable, VariableText] = Field({}, max_length=100, description="More variables; no secrets.")
    test_timeout: float = Field(60.0, gt=0, le=3600, description="Seconds for a task's tests.")
    sandbox: SandboxSettings = SandboxSettings()


class HarnessTask(TaskPayload):
    """What the agent is asked to do, and how that is judged: by `tests`, by `expected_answer`, else by the exit status."""

    id: str = Field("", max_length=200)
    instruction: str = Field(min_length=1, max_length=100_000)
    image: str = Field("", max_length=200, description="Instead of the configuration's.")
    files: dict[RelativePath, FileText] = Field({}, max_length=200, description="Put into `workdir` before the agent starts.")
    tests: str = Field("", max_length=10_000, description="A shell command in `workdir`; status 0 is a reward of 1.")
    test_files: dict[RelativePath, FileText] = Field({}, max_length=200, description="Put into `workdir` only for `tests`.")
    expected_answer: str = Field("", max_length=MAX_EXPRESSION_CHARS)
    compare: Literal["text", "math"] = Field("text", description="How the answer is compared with the expected one.")
    gold_patch: str = Field("", max_length=5_000_000, description="Passes `tests`; for check_environment, and never shown.")


class Program(NamedTuple):
    """What a harness starts: a shell command for `workdir`, files it needs, and variables besides those of the model."""

    command: str
    files: Mapping[str, bytes]
    variables: Mapping[str, str]


class Harness:
    """What subclasses do not change. They say what to start."""

    config: ClassVar[type[HarnessConfig]] = HarnessConfig
    task: ClassVar[type[HarnessTask]] = HarnessTask
    evaluates_in_sandbox: ClassVar = True

    def program(self, config: Any, task: Any, model: ModelAccess) -> Program:
        """The agent. The instruction is in INSTRUCTION_FILE."""
        raise NotImplementedError

    async def answer(self, workspace: Workspace, config: Any) -> str:
        """What the agent answered, empty when it did not."""
        return await workspace.read(config.answer_file) or ""

    def check_task(self, task: HarnessTask) -> None:
        """Raise ValueError for contradictions, and for an expected answer that math-verify cannot parse."""
        if task.tests and task.expected_answer:
            raise ValueError("a task is judged by `tests` or by `expected_answer`; leave one of them out")
        if task.test_files and not task.tests:
            raise ValueError("`test_files` are for `tests`, which are missing")
        if task.gold_patch and not task.tests:
            raise ValueError("`gold_patch` is for `tests`, which are missing")
        if task.compare == "math":
            shared_verifier().check_gold(task.expected_answer)

    def sandbox_spec(self, config: HarnessConfig, task: HarnessTask) -> SandboxSpec | None:
        return config.sandbox.to_spec(image=task.image, env=config.env)

    async def initialize(self, ctx: InitContext) -> None:
        workspace = _workspace(ctx)
        await workspace.prepare(ctx.task.files, versioned=ctx.config.patch)

    async def run(self, ctx: RunContext) -> Termination:
        assert ctx.sandbox is not None and ctx.gateway is not None  # noqa: S101 - every RUN worker gives both
        # What is judged when a limit ends the sandbox before anything can be brought away: nothing was done.
        ctx.artefacts |= {EXIT_CODE: None, ANSWER: "", PATCH: ""}
        async with ctx.gateway.open(ctx.sandbox, max_calls=ctx.config.max_calls) as model:
            deadline = ctx.budget.deadline
            # When the attempt's time runs out, all is begun anew and nothing to be kept: then its deadline itself shall strike.
            reserve = -_KEEP_SECONDS if deadline.of_attempt else min(_KEEP_SECONDS, deadline.left * _KEEP_SHARE)
            seconds = deadline.left - reserve
            result = await self._carry_out(ctx, ctx.sandbox, model, seconds)
            if model.failure is not None:
                raise model.failure
            await self._keep(ctx, result)
            if isinstance(result, Termination):
                return result
            return self._judge(ctx, model, result, seconds)

    async def evaluate(self, ctx: EvalContext) -> Score:
        if ctx.task.tests:
            return Score([await self._tested(ctx)])
        if ctx.task.expected_answer:
            return Score([await _compared(ctx.task, ctx.artefacts[ANSWER])])
        return Score([RewardComponent("completed", float(ctx.artefacts.get(EXIT_CODE) == 0))])

    def gold_artefacts(self, task: HarnessTask) -> Mapping[str, Any] | None:
        if task.tests:
            return {PATCH: task.gold_patch} if task.gold_patch else None
        if task.expected_answer:
            return {ANSWER: f"\\boxed{{{unwrap(task.expected_answer)}}}" if task.compare == "math" else task.expected_answer}
        return {EXIT_CODE: 0}

    async def restore(self, ctx: EvalContext) -> None:
        """From the patch; what is judged by artefacts alone needs nothing."""
        if not ctx.task.tests:
            return
        if ctx.artefacts.get(PATCH) is None:
            raise EvaluationFailed("the tests need what the agent left, and no patch of it was kept: set `patch`")
        await _workspace(ctx).apply(ctx.artefacts[PATCH])

    async def _carry_out(
        self, ctx: RunContext, sandbox: Session, model: ModelAccess, seconds: float
    ) -> CommandResult | Termination:
        """The program's end, or how it was ended because it may make no more calls."""
        program = self.program(ctx.config, ctx.task, model)
        files = {INSTRUCTION_FILE: ctx.task.instruction.encode(), **program.files}
        for path, data in files.items():
            await sandbox.write_file(path, data)
        variables = {**_model_variables(model), **program.variables, DEADLINE_VARIABLE: str(int(time.time() + seconds))}
        await sandbox.set_env(variables)
        # Into a file: a process that the agent has left behind would hold a pipe open, and so the end of the command.
        script = f"(cd {shlex.quote(ctx.config.workdir)} || exit 127\n{program.command}\n) </dev/null >{_OUTPUT_FILE} 2>&1"
        # What the agent leaves running could change what is brought away, and see the tests.
        return await _first(sandbox.bash(script, timeout=seconds, leaves_nothing=True), model.until_over())

    async def _keep(self, ctx: RunContext, result: CommandResult | Termination) -> None:
        """Bring away what the agent has left, as far as it can be."""
        workspace, artefacts, config = _workspace(ctx), ctx.artefacts, ctx.config
        if isinstance(result, CommandResult):
            artefacts[EXIT_CODE] = result.exit_code
        artefacts[OUTPUT] = await workspace.tail(_OUTPUT_FILE, chars=_OUTPUT_CHARS)
        artefacts[ANSWER] = await self.answer(workspace, config)
        if config.collect:
            artefacts[FILES] = {path: await workspace.read(path) for path in config.collect}
        if config.patch:
            artefacts[PATCH] = await workspace.patch()
        else:
            del artefacts[PATCH]
        if workspace.problems:
            artefacts[PROBLEMS] = workspace.problems

    def _judge(self, ctx: RunContext, model: ModelAccess, result: CommandResult, seconds: float) -> Termination:
        if result.limit_exceeded:
            detail = f"{result.limit_exceeded}: what the agent ran exceeded it"
            return Termination(Phase.RUN, Cause.SANDBOX_LIMIT, detail)
        if result.timed_out:
            return Termination(Phase.RUN, Cause.AGENT_TIMEOUT, f"the agent was ended after {seconds:.0f} s")
        if result.exit_code != 0 and model.overflowed:
            return Termination(Phase.RUN, Cause.CONTEXT_OVERFLOW, "a call's prompt left no room in the model's context")
        if model.calls == 0:
            raise EnvironmentFailed(
                f"the agent ended with status {result.exit_code} and made no model call: {_last_line(ctx.artefacts[OUTPUT])}"
            )
        detail = "" if result.exit_code == 0 else f"status {result.exit_code}: {_last_line(ctx.artefacts[OUTPUT])}"
        return Termination(Phase.RUN, Cause.COMPLETED, detail)

    async def _tested(self, ctx: EvalContext) -> RewardComponent:
        assert ctx.sandbox is not None  # noqa: S101 - evaluates_in_sandbox
        await _workspace(ctx).write(ctx.task.test_files)
        script = f"(cd {shlex.quote(ctx.config.workdir)} || exit 127\n{ctx.task.tests}\n) </dev/null 2>&1"
        result = await ctx.sandbox.bash(script, timeout=ctx.config.test_timeout)
        detail = {"exit_code": result.exit_code, "timed_out": result.timed_out, "output": result.output[-_OUTPUT_CHARS:]}
        return RewardComponent("tests", float(result.exit_code == 0), detail=detail)


def _workspace(ctx: InitContext | EvalContext) -> Workspace:
    assert ctx.sandbox is not None  # noqa: S101 - sandbox_spec asks for one
    return Workspace(ctx.sandbox, ctx.config.workdir)


def _model_variables(model: ModelAccess) -> dict[str, str]:
    """As the official clients of the three APIs look for them."""
    return {
        "OPENAI_BASE_URL": f"{model.url}/v1",
        "OPENAI_API_BASE": f"{model.url}/v1",
        "OPENAI_API_KEY": model.key,
        "ANTHROPIC_BASE_URL": model.url,
        "ANTHROPIC_API_KEY": model.key,
        "GOOGLE_GEMINI_BASE_URL": model.url,
        "GEMINI_API_KEY": model.key,
        "PRORL_MODEL": model.model,
        "PRORL_INSTRUCTION_FILE": INSTRUCTION_FILE,
    }


async def _compared(task: HarnessTask, answer: str) -> RewardComponent:
    if task.compare == "text":
        right = answer.strip() == task.expected_answer.strip()
        return RewardComponent("answer", float(right), detail={"answered": answer[:_DETAIL_CHARS]})
    found = final_answer(answer) or answer.strip()
    if not found:
        return RewardComponent("answer", 0.0, detail={"problem": "there is no answer"})
    verdict = await shared_verifier().verify(task.expected_answer, found)
    detail = {"expected": verdict["parsed_gold"], "answered": verdict["parsed_answer"]}
    return RewardComponent("answer", float(verdict["correct"]), detail=detail)


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:_DETAIL_CHARS] if lines else "it printed nothing"


async def _first(work: Awaitable[Result], end: Awaitable[Termination]) -> Result | Termination:
    """Whichever is done first; the other one is cancelled, and has ended."""
    working, ending = asyncio.ensure_future(work), asyncio.ensure_future(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else ending.result()
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.wait({working, ending})
