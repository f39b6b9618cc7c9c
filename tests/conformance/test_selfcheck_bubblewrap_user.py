"""The bubblewrap backend keeps the contract for an ordinary user."""

from __future__ import annotations

import pytest

from tests.conformance.ordinary_user import expect_suite_passed
from tests.conformance.suite import usable_backend


def test_whole_suite(tmp_path_factory: pytest.TempPathFactory) -> None:
    usable_backend("bubblewrap", tmp_path_factory)
    expect_suite_passed("bubblewrap")
