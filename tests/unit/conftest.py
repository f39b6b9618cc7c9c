"""A broker as a plain process, without a sandbox around it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path

import pytest

from sandboxes import channel
from sandboxes.backends.bundle import START, build_bundle
from sandboxes.session import BrokerSession

LIMITS = {
    "memory_mb": 4096,
    "processes": 100_000,  # counted for the whole user where there is no namespace
    "file_size_mb": 16,
    "disk_mb": 0,
    "flood_mb": 64,
    "open_files": 1024,
    "output_bytes": 1000,
}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bundle") / "broker.pyz"
    path.write_bytes(build_bundle(sys.executable))
    return path


def start_broker(
    bundle: Path, home: Path, dead_man: float = 60.0, limits: Mapping[str, float] | None = None, **more: object
) -> subprocess.Popen[bytes]:
    """`limits` replace some of LIMITS; `more` is added to the configuration."""
    config = home / "config.json"
    env = {"HOME": str(home), "PATH": "/usr/bin:/bin"}
    text = json.dumps({"limits": {**LIMITS, **(limits or {})}, "env": env, "dead_man_seconds": dead_man, **more})
    config.write_text(text)
    with channel.listen(home) as listener, config.open("rb") as file:
        return subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, str(bundle), str(file.fileno()), "label"],
            stdin=listener.fileno(),
            pass_fds=[file.fileno()],
            env=env,
        )


@pytest.fixture
def broker(bundle: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    process = start_broker(bundle, tmp_path)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
async def session(broker: subprocess.Popen[bytes], tmp_path: Path) -> AsyncIterator[BrokerSession]:
    session = await BrokerSession.open("test", channel.connect(tmp_path))
    yield session
    await session.close()
