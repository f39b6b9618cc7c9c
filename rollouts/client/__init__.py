"""The client that trainers install. Needs httpx, msgpack and backports.zstd, and nothing else of this repository.

    from rollouts.client import Client

    with Client("https://rollouts.example", api_key) as client:
        run = client.create_run("grpo", policy="tiny")
        client.submit_groups(run["id"], [{"dataset": "sums", "key": "one", "n": 8}])
        for result in client.iter_results(run["id"]):
            print(result["id"], result["reward"])

`AsyncClient` has the same methods to await. Both repeat requests that met a broken connection, a 429 or a 5xx, without creating
anything twice.
"""

from .aio import AsyncClient
from .arrays import SegmentArrays, unpack
from .errors import ApiError, BudgetExhausted, FieldError, TooManyQueued
from .events import Event
from .sessions import AsyncSession, Session
from .sync import Client

__all__ = [
    "ApiError",
    "AsyncClient",
    "AsyncSession",
    "BudgetExhausted",
    "Client",
    "Event",
    "FieldError",
    "SegmentArrays",
    "Session",
    "TooManyQueued",
    "unpack",
]
