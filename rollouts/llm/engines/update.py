"""New weights for one server, step by step. Who keeps calls away from it, and notes that it is done, is the caller's.

    drain      nobody calls it any more -> pause -> load -> resume
    abort      its requests are aborted (each answers with its ids, and goes on from them) -> as drain
    continue   requests are kept -> load -> they go on with the new weights

Which weights sampled which ids is exact in all three: in the first two because nothing is sampled meanwhile, in the third
because the server says it for each reply. A server that does not say it is not asked to continue: `able` tells.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Literal

from rollouts.llm.capabilities import Feature
from rollouts.llm.engines.control import Control
from rollouts.llm.engines.sources import LoraSource, PathSource
from rollouts.llm.errors import ModelError
from rollouts.llm.types import ServerAddress

Mode = Literal["drain", "continue", "abort"]

_KEEPS_AND_TELLS = frozenset({Feature.PAUSE, Feature.GENERATE, Feature.WEIGHT_VERSION})


def able(server: ServerAddress, mode: Mode) -> Mode:
    """The mode that is exact on this server: `abort` in place of a `continue` that nobody could tell the versions of."""
    return "abort" if mode == "continue" and not server.features >= _KEEPS_AND_TELLS else mode


@contextlib.asynccontextmanager
async def paused(control: Control, server: ServerAddress, mode: Mode, *, timeout: float) -> AsyncIterator[None]:
    """The server samples nothing inside of the context, and goes on afterwards whatever happened in it.

    When it fails, requests that were kept are aborted: what weights they would go on with is not known.
    """
    if Feature.PAUSE not in server.features:
        yield
        return
    try:
        await control.pause("keep" if mode == "continue" else "wait", timeout=timeout)
        yield
    except BaseException:
        with contextlib.suppress(ModelError):  # why it failed is more than that it cannot be cleaned up
            if mode == "continue":
                await control.abort_requests()
            await control.resume()
        raise
    await control.resume()


async def resume(control: Control, server: ServerAddress) -> None:
    """Have a server that may have been left paused go on; harmless to one that was not."""
    if Feature.PAUSE in server.features:
        await control.resume()


async def load(
    control: Control,
    server: ServerAddress,
    source: PathSource | LoraSource,
    version: int,
    *,
    recompute_running: bool,
    timeout: float,
) -> None:
    """Load weights into a paused server, and have it call them `version`."""
    match source:
        case PathSource(path=path):
            await control.reload(path, timeout=timeout)
        case LoraSource(name=name, path=path):
            await control.load_lora(name, path, timeout=timeout)
    if Feature.PAUSE in server.features:
        await control.reset_prefix_cache(recompute_running=recompute_running)
    if Feature.WEIGHT_VERSION in server.features:
        await control.label(version)
