from __future__ import annotations

import pytest

from tests.integration.domain import Domain


@pytest.fixture
def domain(db: None) -> Domain:
    return Domain()
