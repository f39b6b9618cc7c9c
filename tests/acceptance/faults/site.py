"""All that a running site consists of, each part of it ours to kill: database, broker, model, platform processes."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollouts.client import Client
from tests.acceptance.faults.model import Model
from tests.acceptance.platform import ISSUE_KEY, Platform
from tests.services.postgres import CrashingPostgres
from tests.services.rabbitmq import RabbitMQ

POLICY = "tiny"
STAGES = ("init", "run", "eval")
_CONCURRENCY = 16
_MODEL_SECONDS = 0.4  # per reply: long enough to be struck in the middle of one
_PATIENCE = 120.0  # seconds for which a client goes on trying; longer than any outage here


class Site:
    """`settings` are PRORL_* variables, as for `Platform`."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack, **settings: object) -> None:
        """Everything is stopped when `stack` is left."""
        self.postgres = stack.enter_context(CrashingPostgres(folder / "postgres"))
        self.broker = RabbitMQ(folder / "rabbitmq")
        stack.callback(self.broker.stop)
        self.model = Model(delay=_MODEL_SECONDS)
        stack.callback(self.model.kill)
        # A turn that waits for long has no failure to be told of.
        waits = {"server_wait_seconds": 3, "slow_start_seconds": 0}
        own = {"probe_seconds": 1, "db_pool_size": 4, "blob_threshold": 1024, **waits}
        self.platform = Platform(folder / "var", self.broker.url, postgres_url=self.postgres.url, **own | settings)
        stack.callback(self.platform.close)
        self.platform.start_execution(_CONCURRENCY)
        self.url = self.platform.start_web()
        self._key = self.platform.shell(ISSUE_KEY)
        with self.client() as client:
            client.register_server(self.model.url, policy=POLICY)
            client.create_environment("sums", handler="arithmetic")
            client.create_environment("problems", handler="math", config={"max_turns": 3})

    def client(self) -> Client:
        return Client(self.url, self._key, patience=_PATIENCE)

    def restart(self, name: str) -> None:
        """Start a killed process of the platform again, as its supervisor would."""
        if name in STAGES:
            self.platform.start_worker(name, _CONCURRENCY)
        elif name == "web":
            self.platform.start_web()
        else:
            self.platform.start_dispatcher()

    def in_state(self, run_id: str, state: str) -> int:
        return int(self.platform.value("SELECT count(*) FROM rollouts_rollout WHERE run_id = %s AND state = %s", run_id, state))

    def wait_for(self, condition: Callable[[], Any], what: str, *, timeout: float = 60.0) -> None:
        self.platform.wait_for(condition, what, timeout=timeout)

    def mend(self) -> None:
        """Bring back what a scenario that failed half-way left dead or frozen, so that it fails alone."""
        if self.model.process.poll() is not None:
            self.model.start()
        self.model.thaw()
        self.model.answer_after(None)
        if self.broker.process.poll() is not None:
            self.broker.start()
        if not self.postgres.is_ready():
            self.postgres.start()
        for name, process in list(self.platform.processes.items()):
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
            else:
                self.restart(name)


@contextlib.contextmanager
def running_site(folder: Path, **settings: object) -> Iterator[Site]:
    with contextlib.ExitStack() as stack:
        yield Site(folder, stack, **settings)
