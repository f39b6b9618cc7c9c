"""A model server that costs next to nothing, so that a benchmark measures the platform and not its model.

    python -m benchmarks.fake_model --delay 0.05 --turns 5

It speaks the part of vLLM's API that the platform uses. Every reply but the last of a conversation calls the tool of
`environments.Turns`. Text is encoded as its bytes. Answers are made once and kept: most requests of a benchmark are alike.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
from typing import Any

_START, _END = 256, 257  # ids of what begins and ends a message
_CALL = '<tool_call>\n{"name": "note", "arguments": {"text": "one step further"}}\n</tool_call>'
_LAST = "All five steps are done."
_CLOSING = f",{_END},".encode()


class FakeModel(asyncio.Protocol):
    """One connection. Requests come one after the other, as HTTP/1.1 clients send them."""

    def __init__(self, delay: float, turns: int) -> None:
        self._delay = delay
        self._turns = turns
        self._received = b""
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            start = head.find(b"content-length:")
            length = int(head[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
            if len(self._received) < end + 4 + length:
                return
            body, self._received = self._received[end + 4 : end + 4 + length], self._received[end + 4 + length :]
            self._answer(head.split(b" ", 2)[1].decode(), body)

    def _answer(self, path: str, body: bytes) -> None:
        if path == "/v1/completions":
            # Every message before this reply ends with _END; the prompt's two are not replies, and each reply has its result.
            said = (body.count(_CLOSING) - 1) // 2
            reply = _completion(_LAST if said + 1 >= self._turns else _CALL)
            asyncio.get_running_loop().call_later(self._delay, self._send, reply)
        elif path == "/tokenize":
            self._send(_tokenized(body))
        else:
            self._send(_PAGES.get(path, _MISSING))

    def _send(self, answer: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(answer)


def _http(content: Any) -> bytes:
    body = json.dumps(content).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@functools.cache
def _completion(text: str) -> bytes:
    ids = [*text.encode(), _END]
    logprobs = {"token_logprobs": [-0.25] * len(ids), "tokens": [""] * len(ids), "top_logprobs": None}
    return _http({"choices": [{"text": text, "finish_reason": "stop", "token_ids": ids, "logprobs": logprobs}]})


@functools.lru_cache(maxsize=10_000)
def _tokenized(body: bytes) -> bytes:
    request = json.loads(body)
    tokens: list[int] = []
    for message in request["messages"]:
        tokens += [_START, *f"{message['role']}\n{message['content']}".encode(), _END]
    if request.get("add_generation_prompt"):
        tokens += [_START, *b"assistant\n"]
    return _http({"tokens": tokens, "count": len(tokens), "max_model_len": 32768})


_PAGES = {
    "/v1/models": _http({"data": [{"id": "fake", "max_model_len": 32768}]}),
    "/health": _http({}),
    "/version": _http({"version": "fake"}),
}
_MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


async def _serve(delay: float, turns: int) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: FakeModel(delay, turns), "127.0.0.1", 0, backlog=2048)
    print(json.dumps({"url": f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"}), flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds for every reply")
    parser.add_argument("--turns", type=int, default=5, help="replies of a conversation")
    arguments = parser.parse_args()
    asyncio.run(_serve(arguments.delay, arguments.turns))
