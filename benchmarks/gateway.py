"""What the gateway adds to a model call, and how many calls a second one core of it serves.

Agents of five turns, with a tool call in all but the last, talk chat completions to a gateway that is bound to one core; the
model, which answers at once, and the agents share the others. The overhead is the time of a call through the gateway less that
of a call of as many ids to the model, one at a time. The calls of one core are those of 64 agents at once for each CPU second
of the gateway: agents and model must not be what limits it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp

from benchmarks.meter import Meter
from benchmarks.report import Figure, Machine, conclude, table
from rollouts.llm.client import ModelClient
from rollouts.llm.types import Sampling, ServerAddress, TokenPrompt

TURNS = 5
ROUNDS = 5
SEQUENTIAL = 10  # agents of a round, one after the other
CONCURRENT = 64  # agents at once
AGENTS = 128  # of a round
OVERHEAD_TARGET = 5.0
RATE_TARGET = 300.0

_TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Takes a note.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}
_SYSTEM = "You are an agent that works on a task step by step. " * 40  # 2 KB, as agents have it
_OUTPUT = "a line of output of a tool\n" * 20


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # in order, so that what was started ends too
    machine = Machine()
    cpu, *others = sorted(os.sched_getaffinity(0))
    if others:
        os.sched_setaffinity(0, set(others))  # of this process and the model's
    with (
        _process("benchmarks.fake_model", "--delay", "0", "--turns", str(TURNS)) as (model, _),
        _process("benchmarks.bare_gateway", "--model", model, "--cpu", str(cpu)) as (gateway, pid),
    ):
        through, direct, rates, costs = asyncio.run(_measure(gateway, model, Meter({"gateway": pid}), machine))
    overhead = statistics.median(through) - statistics.median(direct)
    table(
        f"one call at a time, {len(through)} calls",
        ["way", "p50 ms", "p95 ms"],
        [(name, statistics.median(times), _p95(times)) for name, times in (("gateway", through), ("direct", direct))],
    )
    figures = [
        Figure("overhead of a call, p50", overhead, "ms", OVERHEAD_TARGET),
        Figure("calls on one core", 1000 / statistics.median(costs), "1/s", RATE_TARGET, at_least=True),
        Figure("calls while agents and model take their part", statistics.median(rates), "1/s"),
    ]
    return conclude("gateway", figures, machine)


async def _measure(
    gateway: str, model: str, meter: Meter, machine: Machine
) -> tuple[list[float], list[float], list[float], list[float]]:
    """Milliseconds of each call through the gateway and direct, then calls a second and CPU milliseconds of rounds."""
    through: list[float] = []
    direct: list[float] = []
    rates, costs = [], []
    numbers = iter(range(10**9))
    async with _session() as http, _model_client() as client:
        for _ in range(ROUNDS):
            for _ in range(SEQUENTIAL):
                through += await _agent(http, gateway, next(numbers))
                direct += await _direct(client, model)
            machine.sample()
        for _ in range(ROUNDS):
            meter.begin()
            begun = time.perf_counter()
            gate = asyncio.Semaphore(CONCURRENT)

            async def one(number: int, gate: asyncio.Semaphore = gate) -> None:
                async with gate:
                    await _agent(http, gateway, number)

            await asyncio.gather(*(one(next(numbers)) for _ in range(AGENTS)))
            rates.append(AGENTS * TURNS / (time.perf_counter() - begun))
            costs.append(meter.cpu()["gateway"] / (AGENTS * TURNS) * 1000)
            machine.sample()
    return through, direct, rates, costs


async def _agent(http: aiohttp.ClientSession, gateway: str, number: int) -> list[float]:
    """Carry out one conversation; the milliseconds of each call."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": f"Task {number}"},
    ]
    headers = {"Authorization": f"Bearer {number}", "Content-Type": "application/json"}
    times = []
    for _ in range(TURNS):
        body = json.dumps({"model": "m", "messages": messages, "tools": [_TOOL]}).encode()
        begun = time.perf_counter()
        async with http.post(f"{gateway}/v1/chat/completions", data=body, headers=headers) as response:
            answer = json.loads(await response.read())
        times.append((time.perf_counter() - begun) * 1000)
        message = answer["choices"][0]["message"]
        messages.append(message)
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": _OUTPUT} for call in message.get("tool_calls", ())]
    assert not message.get("tool_calls"), "the agent was to end with an answer"
    return times


async def _direct(client: ModelClient, model: str) -> list[float]:
    """The milliseconds of as many calls with as many ids, without a gateway."""
    server = ServerAddress(model, "fake", "policy", 1, 32768)
    ids = list((_SYSTEM + json.dumps(_TOOL)).encode())
    times = []
    for _ in range(TURNS):
        begun = time.perf_counter()
        completion = await client.generate(server, TokenPrompt(ids), Sampling(), timeout=60)
        times.append((time.perf_counter() - begun) * 1000)
        ids += completion.token_ids + list(_OUTPUT.encode())
    return times


@contextlib.asynccontextmanager
async def _session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        yield http


@contextlib.asynccontextmanager
async def _model_client() -> AsyncIterator[ModelClient]:
    client = ModelClient()
    yield client
    await client.close()


@contextlib.contextmanager
def _process(module: str, *arguments: str) -> Iterator[tuple[str, int]]:
    """A program that prints its URL; and its pid."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["url"], process.pid
    finally:
        process.terminate()
        process.wait()


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


if __name__ == "__main__":
    sys.exit(main())
