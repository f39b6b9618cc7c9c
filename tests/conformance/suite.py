"""The contract of sandboxes, each check as a test."""

from __future__ import annotations

import asyncio

import pytest

from sandboxes.errors import BackendUnavailable
from sandboxes.options import NodeOptions
from sandboxes.protocol import Backend
from sandboxes.registry import get_backend
from sandboxes.selfcheck import CHECKS, Check, Outcome, run_check

OPTIONS = NodeOptions(full_network=True)


def usable_backend(name: str, tmp_path_factory: pytest.TempPathFactory, options: NodeOptions = OPTIONS) -> Backend:
    """A backend with a state directory of its own; skips the test where the host lacks it."""
    backend = get_backend(name, tmp_path_factory.mktemp("sandboxes"), options)
    try:
        asyncio.run(backend.probe())
    except BackendUnavailable as error:
        pytest.skip(str(error))
    return backend


every_check = pytest.mark.parametrize("check", CHECKS.values(), ids=lambda check: check.id)


async def expect_passed(check: Check, backend: Backend) -> None:
    result = await run_check(check, backend)
    if result.outcome is Outcome.SKIPPED:
        pytest.skip(result.detail)
    assert result.outcome is Outcome.PASSED, result.detail
    assert await backend.list() == []
