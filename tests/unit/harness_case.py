"""One rollout of a harness environment from INIT to EVAL, with a real sandbox, the real gateway and a scripted model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rollouts.engine.deadlines import Deadline
from rollouts.engine.records import MessageRecord, RunOutcome, ToolCallRecord, TurnRecord
from rollouts.engine.stages import eval_stage, init_stage, run_stage
from rollouts.environments import registry
from rollouts.environments.base import EvalContext, InitContext, RunContext, Score
from rollouts.llm.buffer import validate
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.route import FixedRoute, Route
from rollouts.llm.types import ModelCallRecord, Sampling, ServerAddress
from rollouts.worker.agent_gateway import SandboxGateway
from sandboxes.protocol import HOST, Backend, Root, Session


class Recording:
    """A store in memory; `error` is what it raises instead of storing."""

    def __init__(self) -> None:
        self.turns: list[TurnRecord] = []
        self.error: Exception | None = None

    async def turn(self, record: TurnRecord) -> None:
        if self.error is not None:
            raise self.error
        self.turns.append(record)

    @property
    def calls(self) -> list[ModelCallRecord]:
        return [turn.model_call for turn in self.turns if turn.model_call]

    @property
    def messages(self) -> list[MessageRecord]:
        return [message for turn in self.turns for message in turn.messages]

    @property
    def tool_calls(self) -> list[ToolCallRecord]:
        return [call for turn in self.turns for call in turn.tool_calls]


@dataclass
class Played:
    """What came of a rollout. `score` is None where RUN raised."""

    outcome: RunOutcome
    score: Score
    recording: Recording

    @property
    def artefacts(self) -> dict[str, Any]:
        return self.outcome.artefacts


@dataclass
class HarnessCase:
    """An environment with its configuration, on one backend, against one model server."""

    backend: Backend
    address: ServerAddress
    handler: str
    config: dict[str, Any]
    root: Root = HOST
    seconds: float = 60.0  # the agent's time
    max_tokens: int = 400
    of_attempt: bool = False
    route: Route | None = None  # instead of the one to `address`
    recording: Recording = field(default_factory=Recording)

    @contextlib.asynccontextmanager
    async def sandbox(self, task: Any, name: str = "prorl-harness-1") -> AsyncIterator[Session]:
        """Started, and prepared by INIT."""
        environment, config = registry.get(self.handler), registry.validate_config(self.handler, self.config)
        spec = environment.sandbox_spec(config, task)
        assert spec is not None
        await self.backend.start(name, spec, self.root)
        try:
            session = await self.backend.connect(name)
            try:
                await init_stage(environment, InitContext(config, task, session), deadline=_deadline(60))
                yield session
            finally:
                await session.close()
        finally:
            await self.backend.stop(name)

    async def run(self, task: Any, session: Session) -> RunOutcome:
        client = ModelClient()
        route, sampling = self.route or FixedRoute(self.address), Sampling(max_tokens=self.max_tokens)
        gateway = SandboxGateway(client, route, self.recording, sampling=sampling, call_timeout=60.0)
        conversation = Conversation(client, route, sampling, call_timeout=60.0)
        config = registry.validate_config(self.handler, self.config)
        ctx = RunContext(config, task, session, conversation, self.recording, gateway)
        deadline = Deadline.after(self.seconds, "the test's time", of_attempt=self.of_attempt)
        try:
            return await run_stage(registry.get(self.handler), ctx, deadline=deadline)
        finally:
            await client.close()

    async def play(self, **payload: Any) -> Played:
        """From INIT to EVAL; what was sampled is one valid trajectory."""
        task = registry.validate_task(self.handler, payload)
        async with self.sandbox(task) as session:
            outcome = await self.run(task, session)
            score = await self.score(task, outcome.artefacts, session)
        validate(self.recording.calls)
        return Played(outcome, score, self.recording)

    async def score(self, task: Any, artefacts: Mapping[str, Any], session: Session) -> Score:
        ctx = self.eval_context(task, artefacts, session)
        return await eval_stage(registry.get(self.handler), ctx, deadline=_deadline(60))

    def eval_context(self, task: Any, artefacts: Mapping[str, Any], session: Session) -> EvalContext:
        return EvalContext(registry.validate_config(self.handler, self.config), task, artefacts, session)


def _deadline(seconds: float) -> Deadline:
    return Deadline.after(seconds, "the test's time")


def tool_call(name: str, **arguments: Any) -> str:
    """As the scripted model writes one."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
