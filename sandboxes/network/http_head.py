"""The head of a request to an HTTP proxy: what it asks for, and how it is passed on. No Django."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import h11

from sandboxes.network.policy import normalise_host

_MAX_HEAD = 64 * 1024
_CHUNK = 64 * 1024
_OF_ONE_CONNECTION = {b"connection", b"proxy-connection", b"proxy-authorization", b"keep-alive", b"upgrade", b"te", b"host"}
_FRAMING = {b"content-length", b"transfer-encoding"}  # stay, whatever the client lists in `Connection`

Headers = Iterable[tuple[bytes, bytes]]


class BadHead(Exception):
    """Not a request to a proxy; `status` is the answer to it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Head:
    """`host` is normalised. `tunnel` is for CONNECT, which has no `path`; `rest` is what the client sent after the head."""

    method: bytes
    host: str
    port: int
    tunnel: bool
    path: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    rest: bytes

    @property
    def authority(self) -> str:
        """host:port, with an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def request(self, *, to_proxy: bool, extra: Headers = ()) -> bytes:
        """The head to pass on, for one exchange: to its server, or in absolute form `to_proxy`."""
        authority = (self.authority if self.port != 80 else self.authority.removesuffix(":80")).encode()
        target = b"http://" + authority + self.path if to_proxy else self.path
        headers = [(b"Host", authority), *self.headers, (b"Connection", b"close"), *extra]
        lines = [b"%b %b HTTP/1.1" % (self.method, target), *(b"%b: %b" % header for header in headers)]
        return b"\r\n".join(lines) + b"\r\n\r\n"


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """None when the client went away without a request. Raises BadHead."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_MAX_HEAD)
    try:
        while (event := connection.next_event()) is h11.NEED_DATA:
            connection.receive_data(await reader.read(_CHUNK))
    except h11.RemoteProtocolError as error:
        raise BadHead(error.error_status_hint, str(error)) from None
    if not isinstance(event, h11.Request):
        return None
    rest, _ = connection.trailing_data
    tunnel = event.method == b"CONNECT"
    try:
        host, port, path = _authority(event.target) if tunnel else _absolute(event.target)
        host = normalise_host(host)
    except ValueError as error:
        raise BadHead(400, f"{event.target[:200].decode()}: {error}") from None
    headers = tuple((name, value) for name, value in event.headers.raw_items() if _passes_on(name, event.headers))
    return Head(event.method, host, port, tunnel, path, headers, rest)


def _authority(target: bytes) -> tuple[str, int, bytes]:
    host, _, port = target.decode().rpartition(":")
    if not (host and port.isdigit() and 0 < int(port) < 65536):
        raise ValueError("CONNECT needs HOST:PORT")
    return host, int(port), b""


def _absolute(target: bytes) -> tuple[str, int, bytes]:
    url = urlsplit(target.decode())
    if url.scheme.lower() != "http":
        raise ValueError("this is a proxy: it wants an http:// URL, or CONNECT for everything else")
    if url.hostname is None or "@" in url.netloc:
        raise ValueError("the URL needs a host, and no user name")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    return host, url.port or 80, path.encode()


def _passes_on(name: bytes, headers: Headers) -> bool:
    listed = {token.strip().lower() for key, value in headers if key == b"connection" for token in value.split(b",")}
    return name.lower() in _FRAMING or name.lower() not in _OF_ONE_CONNECTION | listed
