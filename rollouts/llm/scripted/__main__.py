"""Run the scripted server as a process. It prints one JSON line once it really listens, and exits on SIGTERM."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import stat
import sys

from rollouts.llm.scripted.script import Script, echo
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.scripted.solver import solver

PARENT_CHECK_SECONDS = 0.5


def main() -> None:
    """Parse the command line and serve. An API key is taken from SCRIPTED_API_KEY."""
    parser = argparse.ArgumentParser(prog="python -m rollouts.llm.scripted", description=__doc__)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--script", choices=["solver", "echo"], default="solver")
    parser.add_argument("--accuracy", type=float, default=0.7, help="how often the solver is right")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each reply")
    parser.add_argument("--token-delay", type=float, default=0.0, help="seconds for each token")
    parser.add_argument("--max-running", type=int, default=1024, help="requests that are sampled at once")
    parser.add_argument("--model", default="scripted", help="the served model's name")
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pictures", action="store_true", help="the model sees")
    parser.add_argument("--die-with-parent", action="store_true", help="exit when the parent ends or closes our stdin pipe")
    arguments = parser.parse_args()
    script: Script = echo if arguments.script == "echo" else solver(arguments.accuracy)
    server = ScriptedServer(
        script=script,
        model=arguments.model,
        max_model_len=arguments.max_model_len,
        delay=arguments.delay,
        token_delay=arguments.token_delay,
        max_running=arguments.max_running,
        seed=arguments.seed,
        pictures=arguments.pictures,
        api_key=os.environ.get("SCRIPTED_API_KEY", ""),
        host=arguments.host,
        port=arguments.port,
    )
    asyncio.run(_serve(server, arguments.die_with_parent))


async def _serve(server: ScriptedServer, die_with_parent: bool) -> None:
    parent = os.getppid()
    end = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end.set)
    async with server:
        print(json.dumps({"url": server.url, "model": server.model, "pid": os.getpid()}), flush=True)
        if die_with_parent:
            if stat.S_ISFIFO(os.fstat(sys.stdin.fileno()).st_mode):
                loop.add_reader(sys.stdin.fileno(), _end_at_eof, end)
            while os.getppid() == parent and not end.is_set():
                await _wait(end, PARENT_CHECK_SECONDS)
        else:
            await end.wait()


def _end_at_eof(end: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        end.set()


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return


if __name__ == "__main__":
    main()
