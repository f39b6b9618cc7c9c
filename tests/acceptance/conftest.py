from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def slow_model() -> Iterator[str]:
    """A scripted model that takes half a second for each reply."""
    yield from scripted("--delay", "0.5")


@pytest.fixture(scope="session")
def quick_model() -> Iterator[str]:
    yield from scripted()


@pytest.fixture(scope="session")
def seeing_model() -> Iterator[str]:
    """The URL of one that sees."""
    yield from scripted("--pictures")


def scripted(*arguments: str) -> Iterator[str]:
    """The URL of a scripted model in a process of its own."""
    command = [sys.executable, "-m", "rollouts.llm.scripted", "--die-with-parent", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"]
        process.terminate()
