"""The application as it is served: by uvicorn, in this process, on the test database."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from prorl_site.asgi import application
from prorl_site.embedded.processes import wait_until


@contextmanager
def asgi_server() -> Iterator[str]:
    """A running server; its URL."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(application, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    assert wait_until(lambda: server.started, timeout=30, interval=0.01)
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
