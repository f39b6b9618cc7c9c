"""Servers that can are told the number of their weights, and say it again with every reply and probe.

One that says something else was restarted, or somebody has loaded other weights: nothing it samples may be given that number.
"""

from __future__ import annotations

import asyncio

from rollouts.llm.capabilities import Feature
from rollouts.llm.engines.control import Control
from rollouts.llm.errors import ModelError
from rollouts.llm.transport import Transport
from rollouts.llm.types import ServerAddress

from .errors import FieldError, Unavailable


def label_weights(server: ServerAddress, version: int) -> None:
    """Have a server call its weights `version`. Does nothing where it cannot."""
    if Feature.WEIGHT_VERSION not in server.features:
        return

    async def tell() -> None:
        transport = Transport()
        try:
            await Control(transport, server).label(version)
        finally:
            await transport.close()

    try:
        asyncio.run(tell())
    except ModelError as error:
        raise Unavailable(f"The server was not told its version: {error}", [FieldError("/url", str(error))]) from error
