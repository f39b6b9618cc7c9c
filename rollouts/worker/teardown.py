"""Stopping a sandbox, in bounded time, with a record of what came of it."""

from __future__ import annotations

import asyncio

import structlog

from rollouts.engine.errors import describe
from rollouts.services.sandboxes import note_teardown_failure, note_torn_down
from sandboxes.errors import TeardownFailed
from sandboxes.protocol import Backend

from .database import Database

logger = structlog.get_logger(__name__)

_SECONDS = 30.0  # backends give up earlier; this bounds one that hangs


async def tear_down(database: Database, backend: Backend, name: str, reason: str, *, seconds: float = _SECONDS) -> bool:
    """Whether nothing of the sandbox is left. Else that is logged, counted and recorded, and the janitor tries again."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            await backend.stop(name)
    except Exception as error:
        processes = error.processes if isinstance(error, TeardownFailed) else []
        problem = f"not stopped within {seconds:g} s" if limit.expired() else describe(error)
        logger.warning("sandbox not stopped; the janitor tries again", sandbox=name, processes=processes, error=problem)
        await database.call(note_teardown_failure, name=name, error=problem, processes=processes)
        return False
    await database.call(note_torn_down, name=name, reason=reason)
    return True
