from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.asgi_server import asgi_server
from tests.integration.domain import Domain


@pytest.fixture
def domain(db: None) -> Domain:
    return Domain()


@pytest.fixture
def blob_folder(tmp_path: Path, settings: Any) -> Path:
    """Where the blobs of this test lie, and no others."""
    folder, blobs = tmp_path / "blobs", settings.STORAGES["blobs"]
    options = {**blobs["OPTIONS"], "location": str(folder)}
    settings.STORAGES = {**settings.STORAGES, "blobs": {**blobs, "OPTIONS": options}}
    return folder


@pytest.fixture
def server_url(transactional_db: None) -> Iterator[str]:
    """The application behind a real ASGI server, which streams."""
    with asgi_server() as url:
        yield url
