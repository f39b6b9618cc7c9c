"""Scores finished rollouts again, in EVAL workers, on slots of its own: ordinary evaluation never waits for it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from uuid import UUID

import structlog

from rollouts.engine.deadlines import stage_deadline
from rollouts.engine.errors import classify
from rollouts.engine.stages import eval_stage
from rollouts.environments.base import EvalContext
from rollouts.lifecycle import Phase, Stage
from rollouts.services.rescoring import RescoringClaim, claim_rescorings, fail_rescoring, finish_rescoring

from .large_values import whole_artefacts
from .stages import Tools, environment_of, rebuilt_sandbox

logger = structlog.get_logger(__name__)

_POLL_SECONDS = 2.0


class Rescorer:
    """One per EVAL worker process. `owner` is the process's id, or None while it takes nothing new."""

    def __init__(self, tools: Tools, *, slots: int, owner: Callable[[], UUID | None]) -> None:
        self._tools = tools
        self._slots = slots
        self._owner = owner
        self._seen: UUID | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Take what waits, for ever. What is in hand when this is cancelled goes back once the process has said goodbye."""
        try:
            while True:
                try:
                    await self._take()
                except Exception:
                    logger.exception("could not take rescorings; trying again", seconds=_POLL_SECONDS)
                await self._wait()
        finally:
            self._drop()

    async def _take(self) -> None:
        owner = self._owner()
        if owner is None:
            return
        if owner != self._seen:  # the process was declared lost and started over
            self._drop()
            self._seen = owner
        if room := self._slots - len(self._tasks):
            claims = await self._tools.database.call(claim_rescorings, owner=owner, working_on=list(self._tasks), limit=room)
            for claim in claims:
                self._tasks[claim.rescoring_id] = asyncio.create_task(self._hold(claim))

    async def _wait(self) -> None:
        """Until something in hand is over, or it is time to look again."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=_POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        else:
            await asyncio.sleep(_POLL_SECONDS)
        self._tasks = {id_: task for id_, task in self._tasks.items() if not task.done()}

    def _drop(self) -> None:
        for task in self._tasks.values():
            task.cancel()
        self._tasks = {}

    async def _hold(self, claim: RescoringClaim) -> None:
        """Everything that can go wrong ends here, once, as data."""
        try:
            await self._rescore(claim)
        except Exception as error:
            failure = classify(error, Phase.EVAL)
            logger.warning("rescoring failed", rescoring=claim.rescoring_id, rollout=claim.rollout_id, error=str(error))
            try:
                await self._tools.database.insist(fail_rescoring, claim=claim, failure=failure)
            except Exception:
                logger.exception("could not store how a rescoring ended", rescoring=claim.rescoring_id)

    async def _rescore(self, claim: RescoringClaim) -> None:
        environment, config, task = environment_of(claim)
        artefacts = await whole_artefacts(self._tools.database, claim.artefacts, claim.artefacts_blob)
        async with contextlib.AsyncExitStack() as stack:
            sandbox = None
            if environment.evaluates_in_sandbox:
                rebuilt = rebuilt_sandbox(self._tools, claim, claim.sandbox_name, artefacts)
                sandbox = await stack.enter_async_context(rebuilt)
            ctx = EvalContext(config=config, task=task, artefacts=artefacts, sandbox=sandbox)
            deadline = stage_deadline(claim.settings.timeouts, Stage.EVAL, held_before=0)
            score = await eval_stage(environment, ctx, deadline=deadline)
        await self._tools.database.insist(finish_rescoring, claim=claim, score=score)
