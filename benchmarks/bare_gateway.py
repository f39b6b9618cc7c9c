"""The gateway's application with sessions in memory that record nothing, so that a benchmark measures the gateway alone.

python -m benchmarks.bare_gateway --model URL --cpu 0
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket

import uvicorn

from rollouts.engine.records import TurnRecord
from rollouts.gateway import AgentSession, create_app
from rollouts.llm.client import ModelClient
from rollouts.llm.route import FixedRoute
from rollouts.llm.types import Sampling, ServerAddress


class _Sessions:
    """Every key opens a session; the last ones are kept."""

    def __init__(self, server: ServerAddress) -> None:
        self._server = server
        self._client = ModelClient()
        self._open: dict[str, AgentSession] = {}

    async def find(self, key: str) -> AgentSession:
        if key not in self._open:
            route, recorder = FixedRoute(self._server), _Nowhere()
            session = AgentSession(self._client, route, recorder, sampling=Sampling(), call_timeout=60, model="policy")
            self._open[key] = session
        return self._open[key]


class _Nowhere:
    async def turn(self, record: TurnRecord) -> None:
        pass


async def _serve(model: str) -> None:
    address = ServerAddress(model, "fake", "policy", 1, 32768)
    # By its protocol asyncio knows that it may switch off Nagle's delays.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    print(json.dumps({"url": f"http://127.0.0.1:{listener.getsockname()[1]}"}), flush=True)
    config = uvicorn.Config(create_app(_Sessions(address)), log_config=None, lifespan="off")
    await uvicorn.Server(config).serve([listener])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="URL of the model server")
    parser.add_argument("--cpu", type=int, required=True, help="the one core to run on")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {arguments.cpu})
    asyncio.run(_serve(arguments.model))
