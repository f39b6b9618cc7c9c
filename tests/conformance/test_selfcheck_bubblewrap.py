"""The bubblewrap backend keeps the contract."""

from __future__ import annotations

import pytest

from sandboxes.protocol import Backend
from sandboxes.selfcheck import Check
from tests.conformance.suite import every_check, expect_passed, usable_backend


@pytest.fixture(scope="module")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Backend:
    return usable_backend("bubblewrap", tmp_path_factory)


@every_check
async def test_check(check: Check, backend: Backend) -> None:
    await expect_passed(check, backend)
