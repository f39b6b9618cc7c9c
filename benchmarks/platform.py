"""The platform under measurement: real processes on a database and a broker of their own, in a folder that is removed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg

from benchmarks.meter import Meter
from benchmarks.report import say
from prorl_site.embedded.postgres import EmbeddedPostgres
from rollouts.client import Client
from tests.acceptance.platform import Platform
from tests.services.rabbitmq import RabbitMQ, why_missing

ROOT = Path(__file__).resolve().parent.parent
_PLUGIN = Path(__file__).with_name("plugin")  # makes the environments of environments.py known to the platform's processes
# What `prorl up` runs with; the test platform's own are shorter.
_AS_SHIPPED = {"dispatch_seconds": 1, "heartbeat_seconds": 2, "lease_seconds": 30, "hint_timeout_seconds": 20}

_PROJECT = """
import json
from rollouts.models import Project
from rollouts.services import keys, registry, servers
project = Project.objects.create(name="bench")
registry.create_environment(project=project, name={handler!r}, handler={handler!r}, config={{}})
servers.register_server(project=project, url={url!r}, policy="fake", capacity={capacity})
print(json.dumps(keys.issue_key(project=project, name="bench", scopes=["admin"]).secret))
"""


class MeasuredPlatform(Platform):
    """A test platform that knows its servers, too."""

    def __init__(self, folder: Path, postgres: EmbeddedPostgres, broker: RabbitMQ | None, **settings: object) -> None:
        super().__init__(folder, broker.url if broker else "", **_AS_SHIPPED | settings)
        self._log = folder.parent / "postgres.log"
        self._servers = {"database": int((folder.parent / "postgres" / "postmaster.pid").read_text().split()[0])}
        if broker:
            self._servers["broker"] = broker.process.pid

    def meter(self) -> Meter:
        """Of all programs that run now."""
        return Meter({**{name: process.pid for name, process in self.processes.items()}, **self._servers})

    def start_model(self, *, seconds: float, turns: int = 1, name: str = "model") -> str:
        """A fake model that takes `seconds` for every reply and ends a conversation after `turns`; its URL."""
        model = self.spawn(name, "benchmarks.fake_model", "--delay", str(seconds), "--turns", str(turns))
        log = self.folder / "log" / f"{name}.log"
        self.wait_for(lambda: log.read_text().strip() or model.poll() is not None, "the model server")
        return str(json.loads(log.read_text())["url"])

    def start_trainer(self, *, model: str, capacity: int, handler: str = "turns") -> Client:
        """A web server, and a client of it in a project with the policy `fake` and an environment named like its handler."""
        url = self.start_web()
        return Client(url, self.shell(_PROJECT.format(url=model, capacity=capacity, handler=handler)))

    @contextlib.contextmanager
    def statements(self) -> Iterator[Counter[str]]:
        """Counts what the database is asked in this block, by shape. Logging them costs time: measure that in another round."""
        counted: Counter[str] = Counter()
        begins = self._log.stat().st_size
        self._log_statements("all")
        try:
            yield counted
        finally:
            self._log_statements("none")
            with self._log.open("rb") as log:
                log.seek(begins)
                counted.update(_shapes(log.read().decode(errors="replace")))

    def _log_statements(self, which: str) -> None:
        self._execute(f"ALTER SYSTEM SET log_statement = '{which}'")
        self._execute("SELECT pg_reload_conf()")
        self.wait_for(lambda: self.value("SHOW log_statement") == which, "the database to read its settings")

    def _execute(self, statement: str) -> None:
        with psycopg.connect(self.database_url, autocommit=True) as connection:
            connection.execute(statement)  # type: ignore[arg-type]


# A record goes on in lines that begin with a tab.
_LOGGED = re.compile(r"LOG:  (?:statement|execute [^:]+): (.*(?:\n\t.*)*)")
_COLUMNS = re.compile(r"^SELECT .*? (FROM \S+)")
_VALUES = re.compile(r"'[^']*'|\b\d+\b|\$\d+")


def _shapes(log: str) -> Iterator[str]:
    """The logged statements without their values and columns."""
    for found in _LOGGED.finditer(log):
        text = _COLUMNS.sub(r"SELECT … \1", " ".join(found[1].split()))
        yield _VALUES.sub("?", text)[:110]


@contextlib.contextmanager
def measured_platform(*, rabbitmq: bool = True, **settings: object) -> Iterator[MeasuredPlatform]:
    """A platform with a durable PostgreSQL, without processes yet; `settings` as in `Platform`.

    With `rabbitmq`, and where it is installed, hints go through RabbitMQ, else through files.
    """
    signal.signal(signal.SIGTERM, _leave)
    with scratch_folder() as folder, contextlib.ExitStack() as stack:
        postgres = EmbeddedPostgres(folder / "postgres")
        os.environ["PRORL_DATABASE_URL"] = stack.enter_context(postgres) and postgres.url
        broker = None
        if rabbitmq and not (reason := why_missing()):
            broker = RabbitMQ(folder / "rabbitmq")
            stack.callback(broker.stop)
        elif rabbitmq:
            say(f"without RabbitMQ: {reason}")
        os.environ["DJANGO_SETTINGS_MODULE"] = "prorl_site.settings"
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(_PLUGIN)])
        platform = MeasuredPlatform(folder / "var", postgres, broker, **settings)
        stack.callback(platform.close)
        yield platform


def _leave(*_: object) -> None:
    """Processes of the platform are in sessions of their own: they end when we do so in order."""
    raise SystemExit("stopped")


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """On the disk of the working tree: /tmp may be memory, which would make a durable database too quick."""
    parent = ROOT / "var" / "bench"
    parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=parent, prefix="run-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
