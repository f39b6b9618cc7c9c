from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.asgi_server import asgi_server
from tests.integration.domain import Domain


@pytest.fixture
def domain(db: None) -> Domain:
    return Domain()


@pytest.fixture
def server_url(transactional_db: None) -> Iterator[str]:
    """The application behind a real ASGI server, which streams."""
    with asgi_server() as url:
        yield url
