"""The host's side of files in pieces; the protocol is described in `sandboxes.broker.transfers`. No Django."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncGenerator, AsyncIterable
from typing import Any

from sandboxes.broker.framing import TRANSFER_PIECE, TRANSFER_WINDOW, FrameError
from sandboxes.wire import Call, Wire


async def download(wire: Wire, path: str) -> AsyncGenerator[bytes]:
    """Raises SandboxFileError, at the first piece or a later one."""
    pieces: collections.deque[bytes] = collections.deque()
    arrived = asyncio.Event()

    def on_piece(_header: dict[str, Any], data: bytes) -> None:
        if len(pieces) == TRANSFER_WINDOW or len(data) > TRANSFER_PIECE:
            raise FrameError("more of a file than was asked for")
        pieces.append(data)
        arrived.set()

    with wire.call("download", on_more=on_piece, path=path) as call:
        call.answer.add_done_callback(lambda _: arrived.set())
        while pieces or not call.answer.done():
            if not pieces:
                arrived.clear()
                await arrived.wait()
                continue
            piece = pieces.popleft()
            if not call.answer.done():
                call.send_more({})
            yield piece
        await call.result()


async def upload(wire: Wire, path: str, pieces: AsyncIterable[bytes]) -> None:
    """Raises SandboxFileError."""
    window = _Window()
    with wire.call("upload", on_more=window.on_taken, path=path) as call:
        call.answer.add_done_callback(lambda _: window.changed.set())
        async for piece in pieces:
            for start in range(0, len(piece), TRANSFER_PIECE):
                await window.send(call, piece[start : start + TRANSFER_PIECE])
            if call.answer.done():
                break
        await window.send(call, b"", end=True)
        await call.result()


class _Window:
    """Counts the pieces that were sent and not taken yet."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self._on_their_way = 0

    def on_taken(self, _header: dict[str, Any], _payload: bytes) -> None:
        if self._on_their_way == 0:
            raise FrameError("a piece was taken that was not sent")
        self._on_their_way -= 1
        self.changed.set()

    async def send(self, call: Call, piece: bytes, *, end: bool = False) -> None:
        """Wait for room and send; not to a request that is answered."""
        while self._on_their_way == TRANSFER_WINDOW and not call.answer.done():
            self.changed.clear()
            await self.changed.wait()
        if not call.answer.done():
            self._on_their_way += 1
            call.send_more({"end": end}, piece)
