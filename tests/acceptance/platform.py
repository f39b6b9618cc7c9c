"""A whole platform of real processes on a database of its own: dispatcher, three workers, web server, scripted model."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
from psycopg.rows import dict_row

from prorl_site.embedded.processes import http_answers, wait_until
from tests.services.ports import lasting_port

_ROOT = Path(__file__).resolve().parents[2]
_STOP_SECONDS = 10.0
_HELD = """SELECT count(*) FROM rollouts_rollout r JOIN rollouts_workerprocess w ON w.id = r.lease_owner_id
           WHERE w.stage = %s AND w.pid = %s AND w.lost_at IS NULL AND w.stopped_at IS NULL"""


class Platform:
    """Processes by name. `kill` is SIGKILL; `sql` asks its database."""

    def __init__(self, folder: Path, broker_url: str = "", *, postgres_url: str = "", **settings: object) -> None:
        """`settings` are PRORL_* variables without the prefix, in lower case.

        An empty broker URL means files, an empty one of PostgreSQL the server that all tests share.
        """
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._logs: list[Any] = []
        self._web_port = 0
        server = postgres_url or os.environ["PRORL_DATABASE_URL"]
        name = f"prorl_{os.getpid()}_{time.monotonic_ns()}"
        with psycopg.connect(server, autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')
        self.database_url = server.replace("/prorl?", f"/{name}?")
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PRORL_")},
            "DJANGO_SETTINGS_MODULE": "prorl_site.settings",
            "PRORL_VAR_DIR": str(folder),
            "PRORL_DATABASE_URL": self.database_url,
            "PRORL_SECRET_KEY": "tests only",
            "PRORL_BROKER_URL": broker_url,
            "PRORL_NODE": "test-node",
            "PRORL_DISPATCH_SECONDS": "0.2",
            "PRORL_HEARTBEAT_SECONDS": "0.5",
            "PRORL_LEASE_SECONDS": "3",
            "PRORL_HINT_TIMEOUT_SECONDS": "3",
            **{f"PRORL_{key.upper()}": str(value) for key, value in settings.items()},
        }
        (folder / "log").mkdir(parents=True)
        # However slow the machine: what bounds transactions to a lease must not end this one.
        self.manage("migrate", "--verbosity", "0", lease_seconds=120)

    def manage(self, *arguments: str, **settings: object) -> str:
        """Run a management command to its end and return what it printed."""
        command = [sys.executable, "-m", "django", *arguments]
        env = self.env | {f"PRORL_{key.upper()}": str(value) for key, value in settings.items()}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, f"{arguments} failed:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def shell(self, code: str) -> Any:
        """Run Python with Django set up; the last line it prints is JSON."""
        return json.loads(self.manage("shell", "--no-imports", "-c", code).splitlines()[-1])

    def spawn(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        log = (self.folder / "log" / f"{name}.log").open("ab")
        self._logs.append(log)
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=self.env,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.processes[name] = process
        return process

    def start_worker(self, stage: str, concurrency: int = 8) -> subprocess.Popen[bytes]:
        process = self._spawn_worker(stage, concurrency)
        self._wait_for_worker(stage, process)
        return process

    def start_execution(self, concurrency: int = 8) -> None:
        """Dispatcher and the three workers."""
        self.start_dispatcher()
        workers = {stage: self._spawn_worker(stage, concurrency) for stage in ("init", "run", "eval")}
        for stage, process in workers.items():
            self._wait_for_worker(stage, process)

    def _spawn_worker(self, stage: str, concurrency: int) -> subprocess.Popen[bytes]:
        return self.spawn(stage, "django", "work", stage, "--concurrency", str(concurrency))

    def _wait_for_worker(self, stage: str, process: subprocess.Popen[bytes]) -> None:
        registered = "SELECT count(*) FROM rollouts_workerprocess WHERE pid = %s AND stopped_at IS NULL AND lost_at IS NULL"
        self.wait_for(lambda: process.poll() is not None or self.value(registered, process.pid) == 1, f"the {stage} worker")
        assert process.poll() is None, f"the {stage} worker ended\n{self.tails()}"

    def start_dispatcher(self) -> None:
        self.spawn("dispatcher", "django", "dispatch")

    def start_web(self) -> str:
        """Its URL, the same at every start."""
        self._web_port = self._web_port or lasting_port()
        options = ["--port", str(self._web_port), "--lifespan", "off", "--log-level", "warning"]
        self.spawn("web", "uvicorn", "prorl_site.asgi:application", *options)
        url = f"http://127.0.0.1:{self._web_port}"
        self.wait_for(lambda: http_answers(f"{url}/login/"), "the web server")
        return url

    def freeze_with_work(self, stage: str) -> None:
        """SIGSTOP to a worker that holds rollouts: frozen, it cannot finish what is about to be seen of them."""
        self.wait_for(lambda: self._froze_with_work(stage), f"rollouts in the hands of the {stage} worker")

    def _froze_with_work(self, stage: str) -> bool:
        worker = self.processes[stage]
        if not self.value(_HELD, stage, worker.pid):
            return False
        worker.send_signal(signal.SIGSTOP)
        time.sleep(0.3)  # a statement that it had sent before may still end the rollout, and nothing shows when it has
        if self.value(_HELD, stage, worker.pid):
            return True
        worker.send_signal(signal.SIGCONT)
        return False

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait(_STOP_SECONDS)

    def terminate(self, name: str) -> float:
        """SIGTERM; the seconds it took to end."""
        begun = time.monotonic()
        self.processes[name].send_signal(signal.SIGTERM)
        self.processes[name].wait(_STOP_SECONDS)
        return time.monotonic() - begun

    def rows(self, query: str, *parameters: Any, **named: Any) -> list[dict[str, Any]]:
        """Parameters are %s in the query, or %(name)s."""
        with psycopg.connect(self.database_url, autocommit=True, row_factory=dict_row) as connection:
            return connection.execute(query, named or parameters).fetchall()  # type: ignore[arg-type]

    def value(self, query: str, *parameters: Any) -> Any:
        return next(iter(self.rows(query, *parameters)[0].values()))

    def wait_for(self, condition: Callable[[], Any], what: str, *, timeout: float = 60.0) -> None:
        ok = wait_until(lambda: bool(condition()), timeout=timeout, interval=0.05)
        assert ok, f"waited {timeout:.0f} s for {what}\n{self.tails()}"

    def wait_until_all_finished(self, *, timeout: float = 90.0) -> None:
        self.wait_for(
            lambda: self.value("SELECT count(*) = 0 FROM rollouts_rollout WHERE finished_at IS NULL"),
            "all rollouts",
            timeout=timeout,
        )

    def tails(self) -> str:
        states = self.rows("SELECT state, count(*) FROM rollouts_rollout GROUP BY state")
        logs = [
            f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-15:]) for log in self._log_files()
        ]
        return "\n".join([str(states), *logs])

    def _log_files(self) -> list[Path]:
        return sorted((self.folder / "log").glob("*.log"))

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for log in self._logs:
            log.close()
        self.shell(_STOP_SANDBOXES)


_STOP_SANDBOXES = """
import asyncio
from django.conf import settings
from sandboxes.registry import get_backend
async def stop_all():
    backend = get_backend(settings.SANDBOX_BACKEND, settings.SANDBOX_DIR)
    for name in await backend.list():
        await backend.stop(name)
asyncio.run(stop_all())
print("null")
"""


@contextlib.contextmanager
def running_platform(folder: Path, broker_url: str = "", **settings: object) -> Iterator[Platform]:
    platform = Platform(folder, broker_url, **settings)
    try:
        yield platform
    finally:
        platform.close()


# Makes a project and a key for it.
ISSUE_KEY = """
import json
from rollouts.models import Project
from rollouts.services.keys import issue_key
print(json.dumps(issue_key(project=Project.objects.create(name="alpha"), name="test", scopes=["admin"]).secret))
"""

# Registers the scripted server, an arithmetic and a math environment, and submits groups, through the services.
SUBMIT = """
import json
from rollouts.models import Project
from rollouts.services import registry, servers, submit
project, _ = Project.objects.get_or_create(name="alpha")
if not project.environments.exists():
    registry.create_environment(project=project, name="sums", handler="arithmetic", config={{}})
    registry.create_environment(project=project, name="math", handler="math", config={{"max_turns": 3}})
    servers.register_server(project=project, url={url!r}, policy="tiny", capacity=64)
run = submit.create_run(project=project, name="run", policy="tiny", settings={settings!r})
submit.submit_groups(run=run, groups=[submit.GroupRequest(**group) for group in {groups!r}])
print(json.dumps(str(run.id)))
"""


def submit(platform: Platform, url: str, groups: list[dict[str, Any]], settings: dict[str, Any] | None = None) -> str:
    """Submit groups against the model server at `url`; the run's id."""
    return str(platform.shell(SUBMIT.format(url=url, groups=groups, settings=settings or {})))


def install_environments(platform: Platform, folder: Path, **handlers: str) -> None:
    """As a package that offers them would: `name="module:Class"`. Before the first process starts."""
    metadata = folder / "handlers-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: handlers\nVersion: 1\n")
    lines = [f"{name.replace('_', '-')} = {handler}\n" for name, handler in handlers.items()]
    (metadata / "entry_points.txt").write_text("".join(["[prorl.environments]\n", *lines]))
    platform.env["PYTHONPATH"] = os.pathsep.join([str(folder), str(_ROOT)])


@contextlib.contextmanager
def platform_with_notes(folder: Path, model: str, **config: object) -> Iterator[Platform]:
    """It carries out rollouts; the environments of `notes_environment.py` are installed as a package, and registered."""
    module = "tests.acceptance.notes_environment"
    with running_platform(folder / "var", db_pool_size=2) as running:
        install_environments(running, folder, notes=f"{module}:Notes", bare_notes=f"{module}:BareNotes")
        running.start_execution()
        submit(running, model, [{"n": 1, "environment": "sums", "payload": {"a": 1, "b": 1}}])
        running.shell(_CREATE_NOTES.format(config=config))
        running.wait_until_all_finished()
        yield running


_CREATE_NOTES = """
from rollouts.models import Project
from rollouts.services.registry import create_environment
for name in ("notes", "bare-notes"):
    create_environment(project=Project.objects.get(), name=name, handler=name, config={config!r})
print("null")
"""


def call_bash(command: str, turn: str = "") -> str:
    """A directive for the scripted model: call the tool."""
    call = json.dumps({"name": "bash", "arguments": {"command": command}})
    return f"[[reply{turn}:<tool_call>{call}</tool_call>]]"


def play(platform: Platform, model: str, question: str, *, n: int = 1, init: float = 0, **settings: Any) -> list[Any]:
    """Submit rollouts of `notes` and wait for their end; their rows."""
    payload = {"question": question, "init_seconds": init}
    run_id = submit(platform, model, [{"n": n, "environment": "notes", "payload": payload}], settings)
    platform.wait_until_all_finished()
    return platform.rows("SELECT * FROM rollouts_rollout WHERE run_id = %s ORDER BY id", run_id)
