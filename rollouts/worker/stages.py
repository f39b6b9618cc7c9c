"""What each stage does with a claimed rollout, between the claim and the guarded write that hands it on."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollouts.engine.deadlines import stage_deadline
from rollouts.engine.errors import AttemptSuperseded, EnvironmentFailed, describe
from rollouts.engine.records import TurnRecord
from rollouts.engine.stages import eval_stage, init_stage, restore_stage, run_stage
from rollouts.environments import registry
from rollouts.environments.base import (
    Environment,
    EnvironmentConfig,
    EvalContext,
    InitContext,
    RestoresSandbox,
    RewardComponent,
    RunContext,
    Score,
    TaskPayload,
)
from rollouts.environments.errors import BrokenEnvironment
from rollouts.lifecycle import Cause, OnAgentTimeout, Stage
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.route import OneVersionRoute, Route
from rollouts.run_settings import Versions
from rollouts.services.claim import Claim
from rollouts.services.finish import Scored, Unscored
from rollouts.services.progress import Initialized, Ran, TurnWrite
from rollouts.services.rescoring import RescoringClaim
from sandboxes.errors import LimitExceeded, SandboxLost
from sandboxes.protocol import SandboxSpec, Session
from sandboxes.services import sandbox_name

from .agent_gateway import SandboxGateway
from .database import Database
from .fleet import FleetView
from .large_values import whole_artefacts, without_large_artefacts, without_large_outputs
from .sandboxes import Sandboxes
from .writes import Writes


@dataclass(frozen=True)
class Tools:
    """What the stages of one worker process share."""

    database: Database
    writes: Writes
    models: ModelClient
    sandboxes: Sandboxes
    fleet: FleetView


def environment_of(claim: Claim | RescoringClaim) -> tuple[Environment, EnvironmentConfig, TaskPayload]:
    """The handler with its settings and the task, parsed again: each stage may run in another process."""
    return (
        registry.get(claim.handler),
        registry.validate_config(claim.handler, claim.config),
        registry.parse_task(claim.handler, claim.payload),
    )


def spec_of(environment: Environment, config: EnvironmentConfig, task: TaskPayload) -> SandboxSpec | None:
    """The sandbox that the task needs. Raises `EnvironmentFailed`."""
    try:
        return environment.sandbox_spec(config, task)
    except Exception as error:
        raise EnvironmentFailed(f"sandbox_spec raised {describe(error)}") from error


async def _initialize(tools: Tools, claim: Claim) -> None:
    environment, config, task = environment_of(claim)
    spec = spec_of(environment, config, task)
    name = sandbox_name(claim.rollout_id, claim.attempt) if spec else ""
    deadline = stage_deadline(claim.settings.timeouts, Stage.INIT, held_before=0)
    try:
        if spec:
            await tools.sandboxes.start(name, claim, spec, deadline)
        async with tools.sandboxes.session(name, spec) as session:
            await init_stage(environment, InitContext(config=config, task=task, sandbox=session), deadline=deadline)
    except BaseException:
        if name:
            await tools.sandboxes.stop(name, "initialisation did not finish")
        raise
    # From here on the rollout's row says whether its sandbox is needed, also where the answer to this write is lost or nobody
    # waits for it any more: then the janitor reads it.
    await tools.writes.initialized(Initialized(claim, name))


def route_of(tools: Tools, claim: Claim) -> Route:
    """Its way to the servers; where its run wants one version for all of it, to those of the version it begins on."""
    assert claim.server is not None  # noqa: S101 - a RUN claim chooses one
    route = tools.fleet.route(claim)
    return OneVersionRoute(route, claim.server.policy_version) if claim.settings.versions is Versions.STRICT else route


async def _run(tools: Tools, claim: Claim) -> None:
    environment, config, task = environment_of(claim)
    spec = spec_of(environment, config, task) if claim.sandbox_name else None
    needed = False
    try:
        async with tools.sandboxes.session(claim.sandbox_name, spec) as session:
            route, sampling, timeouts = route_of(tools, claim), claim.settings.sampling.to_sampling(), claim.settings.timeouts
            conversation = Conversation(tools.models, route, sampling, call_timeout=timeouts.model_call)
            recorder = _Recorder(tools, claim)
            gateway = SandboxGateway(
                client=tools.models,
                route=route,
                recorder=recorder,
                sampling=sampling,
                call_timeout=timeouts.model_call,
            )
            ctx = RunContext(config, task, session, conversation, recorder, gateway)
            deadline = stage_deadline(timeouts, Stage.RUN, held_before=claim.held_seconds)
            outcome = await run_stage(environment, ctx, deadline=deadline, action_timeout=timeouts.action)
            outcome = await without_large_artefacts(tools.database, outcome)
        unscored = (OnAgentTimeout.ZERO, OnAgentTimeout.DROP)
        if outcome.termination.cause is Cause.AGENT_TIMEOUT and claim.settings.on_agent_timeout in unscored:
            await tools.writes.unscored(Unscored(claim, outcome))
        else:
            needed = environment.evaluates_in_sandbox  # as in INIT, whatever comes of the write
            await tools.writes.ran(Ran(claim, outcome))
    finally:
        if claim.sandbox_name and not needed:
            await tools.sandboxes.stop(claim.sandbox_name, "RUN ended")


async def _evaluate(tools: Tools, claim: Claim) -> None:
    environment, config, task = environment_of(claim)
    name = claim.sandbox_name if environment.evaluates_in_sandbox else ""
    finished = False
    try:
        artefacts = await whole_artefacts(tools.database, claim.artefacts, claim.artefacts_blob)
        try:
            async with _left_by_run(tools, claim, name, artefacts) as session:
                ctx = EvalContext(config=config, task=task, artefacts=artefacts, sandbox=session)
                deadline = stage_deadline(claim.settings.timeouts, Stage.EVAL, held_before=claim.held_seconds)
                score = await eval_stage(environment, ctx, deadline=deadline)
        except _NothingLeft:
            score = Score([RewardComponent(Cause.SANDBOX_LIMIT.value, 0.0)])
        finished = await tools.writes.scored(Scored(claim, score))
    finally:
        if name and finished:
            await tools.sandboxes.stop(name, "EVAL ended")


@contextlib.asynccontextmanager
async def _left_by_run(tools: Tools, claim: Claim, name: str, artefacts: Mapping[str, Any]) -> AsyncIterator[Session | None]:
    """The sandbox that RUN left, or one rebuilt from its artefacts: a lost node or sandbox is no reason to repeat RUN."""
    environment, config, task = environment_of(claim)
    async with contextlib.AsyncExitStack() as stack:
        try:
            spec = spec_of(environment, config, task) if name else None
            session = await stack.enter_async_context(tools.sandboxes.session(name, spec))
            if session is not None:
                await session.ping()  # a sandbox that was ended for a limit answers with that
        except (SandboxLost, LimitExceeded) as error:
            if not isinstance(environment, RestoresSandbox):
                raise _why_not_evaluated(claim, error) from error
            # Another name for each try: one that was stopped is not started again.
            rebuilt = rebuilt_sandbox(tools, claim, f"{name}-eval-{secrets.token_hex(3)}", artefacts)
            session = await stack.enter_async_context(rebuilt)
        yield session


class _NothingLeft(Exception):
    """What the policy ran has ended the sandbox that evaluation needs, and nobody can rebuild it."""


def _why_not_evaluated(claim: Claim, error: SandboxLost | LimitExceeded) -> Exception:
    if isinstance(error, SandboxLost):
        return error
    if claim.termination_cause == Cause.SANDBOX_LIMIT:
        return _NothingLeft()
    return SandboxLost(f"the sandbox was ended before its evaluation began: {error}")


@contextlib.asynccontextmanager
async def rebuilt_sandbox(
    tools: Tools, claim: Claim | RescoringClaim, name: str, artefacts: Mapping[str, Any]
) -> AsyncIterator[Session | None]:
    """A fresh sandbox, brought to where RUN had left it; None when the task needs none. Stopped afterwards."""
    environment, config, task = environment_of(claim)
    if not isinstance(environment, RestoresSandbox):
        raise BrokenEnvironment(f"environment {claim.handler!r} has no `restore` in this installation")
    spec = spec_of(environment, config, task)
    if spec is None:
        yield None
        return
    deadline = stage_deadline(claim.settings.timeouts, Stage.INIT, held_before=0)
    try:
        await tools.sandboxes.start(name, claim, spec, deadline)
        async with tools.sandboxes.session(name, spec) as session:
            await init_stage(environment, InitContext(config=config, task=task, sandbox=session), deadline=deadline)
            restored = EvalContext(config=config, task=task, artefacts=artefacts, sandbox=session)
            await restore_stage(environment, restored, deadline=deadline)
            yield session
    finally:
        await tools.sandboxes.stop(name, "EVAL ended")


CARRY_OUT: dict[Stage, Callable[[Tools, Claim], Awaitable[None]]] = {
    Stage.INIT: _initialize,
    Stage.RUN: _run,
    Stage.EVAL: _evaluate,
}


class _Recorder:
    """Stores turns under the claim's guard."""

    def __init__(self, tools: Tools, claim: Claim) -> None:
        self._tools = tools
        self._claim = claim

    async def turn(self, record: TurnRecord) -> None:
        record = await without_large_outputs(self._tools.database, record)
        if not await self._tools.writes.turn(TurnWrite(self._claim, record)):
            raise AttemptSuperseded(
                f"attempt {self._claim.attempt} of rollout {self._claim.rollout_id} is not current any more"
            )
