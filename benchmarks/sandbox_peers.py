"""Other ways to run a command. Sessions are on the host itself, so that only the way to them is timed."""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

RunTrue = Callable[[], Awaitable[None]]

# A person would not notice a shorter one; agents' tmux sessions are usually read every 0.1 to 0.5 s.
_TMUX_POLL_SECONDS = 0.01
_MARK = re.compile(r"^done-(\w+)$", re.MULTILINE)


async def run_program(*argv: str, **options: Any) -> None:
    """Run a program to its end, its output thrown away. Raises RuntimeError when it fails."""
    quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    process = await asyncio.create_subprocess_exec(*argv, **quiet, **options)
    if await process.wait() != 0:
        raise RuntimeError(f"{argv[0]} failed with status {process.returncode}")


def exec_per_command(prefix: Sequence[str], options: Mapping[str, Any]) -> RunTrue:
    """A container for each command; `prefix` starts one, in a process with `options`."""

    async def run_true() -> None:
        await run_program(*prefix, "/bin/sh", "-c", "true", **options)

    return run_true


@contextlib.asynccontextmanager
async def tmux_session() -> AsyncIterator[RunTrue]:
    """A shell in tmux: type the command and a mark, and read the screen until the mark shows."""
    server = f"bench-{secrets.token_hex(4)}"

    async def tmux(*arguments: str) -> str:
        process = await asyncio.create_subprocess_exec(
            "tmux", "-L", server, "-f", "/dev/null", *arguments, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        return output.decode()

    async def run_true() -> None:
        mark = secrets.token_hex(4)
        await tmux("send-keys", "-t", "main", f"true; echo done-{mark}", "Enter")
        while mark not in _MARK.findall(await tmux("capture-pane", "-p", "-t", "main")):
            await asyncio.sleep(_TMUX_POLL_SECONDS)

    await tmux("new-session", "-d", "-s", "main", "bash --norc --noprofile")
    try:
        yield run_true
    finally:
        await tmux("kill-server")


@contextlib.asynccontextmanager
async def swe_rex_local() -> AsyncIterator[RunTrue]:
    """SWE-ReX's shell in this process."""
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    from swerex.runtime.local import LocalRuntime

    runtime = LocalRuntime()
    await runtime.create_session(CreateBashSessionRequest())

    async def run_true() -> None:
        await runtime.run_in_session(BashAction(command="true"))

    try:
        yield run_true
    finally:
        await runtime.close()


@contextlib.asynccontextmanager
async def swe_rex_remote() -> AsyncIterator[RunTrue]:
    """SWE-ReX's shell in its own server, over HTTP on loopback."""
    from swerex.runtime.abstract import BashAction, CreateBashSessionRequest
    from swerex.runtime.remote import RemoteRuntime

    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    token = secrets.token_hex(8)  # of a server that only lives for this benchmark
    command = [sys.executable, "-m", "swerex.server", "--host", "127.0.0.1", "--port", str(port), "--auth-token", token]
    server = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    runtime = RemoteRuntime(auth_token=token, port=port, timeout=10)
    try:
        await runtime.wait_until_alive(timeout=30)
        await runtime.create_session(CreateBashSessionRequest())

        async def run_true() -> None:
            await runtime.run_in_session(BashAction(command="true"))

        yield run_true
    finally:
        server.terminate()
        await server.wait()
