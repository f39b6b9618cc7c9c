"""Scripted model servers beside a test that has no event loop, or whose code under test has one of its own."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rollouts.llm.scripted.server import ScriptedServer


@contextmanager
def served(*servers: ScriptedServer) -> Iterator[None]:
    """The servers answer for as long as this lasts."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.__aenter__(), loop).result(30)
    yield
    for server in servers:
        asyncio.run_coroutine_threadsafe(server.__aexit__(None, None, None), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
