"""The whole platform on one machine, as child processes of one command: what `prorl up` and `prorl demo` run."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from prorl_site import env
from prorl_site.embedded.postgres import EmbeddedPostgres
from prorl_site.embedded.processes import free_port, http_answers, port_answers
from prorl_site.embedded.supervisor import Service, Supervisor
from sandboxes.errors import BackendUnavailable
from sandboxes.registry import get_backend

PREFERRED_PORT = 8000
_LAST_PORT = 65_535
# Rollouts worked on at once by each stage: INIT and EVAL are bound by two or more cores, RUN waits for the model.
CONCURRENCY = {"init": 4, "run": 32, "eval": 4}
_WORKERS_STOP, _WEB_STOPS, LLM_STOPS = 0, 10, 20

Say = Callable[[str], None]


class Platform(NamedTuple):
    """A running platform."""

    supervisor: Supervisor
    url: str
    login: str
    password: str


@contextmanager
def platform(say: Say) -> Iterator[Platform]:
    """Start everything that `PRORL_*` variables do not already point at; stop it on leaving, sandboxes included."""
    folder = env.var_dir()
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PRORL_VAR_DIR"] = str(folder)
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "prorl_site.settings")
    with Supervisor(folder, say=say) as supervisor:
        _database(folder, supervisor)
        _secret_key(folder)
        port = _port(say)
        _gateway(port)
        _sandbox_backend(folder, say)
        _leave_settings(folder)
        try:
            _migrate(say)
            login, password = _administrator(folder)
            supervisor.start(*_services(port))
            yield Platform(supervisor, f"http://127.0.0.1:{port}", login, password)
        finally:
            supervisor.stop()
            (folder / "prorl.env").unlink(missing_ok=True)
            _stop_sandboxes()


def _database(folder: Path, supervisor: Supervisor) -> None:
    if os.environ.get("PRORL_DATABASE_URL"):
        return
    postgres = EmbeddedPostgres(folder / "postgres")
    postgres.prepare()
    supervisor.start(postgres.service())
    os.environ["PRORL_DATABASE_URL"] = postgres.url


def _secret_key(folder: Path) -> None:
    if os.environ.get("PRORL_SECRET_KEY") or os.environ.get("PRORL_SECRET_KEY_FILE"):
        return
    os.environ["PRORL_SECRET_KEY_FILE"] = str(_kept_secret(folder / "secret_key"))


def _kept_secret(path: Path) -> Path:
    """A random secret in a file that only this user can read, made once."""
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(32))
    return path


def _port(say: Say) -> int:
    if chosen := os.environ.get("PRORL_PORT"):
        return int(chosen)
    if not port_answers(PREFERRED_PORT):
        return PREFERRED_PORT
    port = free_port()
    say(f"port {PREFERRED_PORT} is taken, using {port} (set PRORL_PORT to choose)")
    return port


def _gateway(web_port: int) -> None:
    """Its port, near the web server's where that is free."""
    near = web_port + 100
    if not os.environ.get("PRORL_GATEWAY_PORT"):
        os.environ["PRORL_GATEWAY_PORT"] = str(free_port() if near > _LAST_PORT or port_answers(near) else near)


def _sandbox_backend(folder: Path, say: Say) -> None:
    """The first that works here. Environments without sandboxes work on any host, so none is no reason to stop."""
    if os.environ.get("PRORL_SANDBOX_BACKEND"):
        return
    problems = []
    for name in ("bubblewrap", "apptainer"):
        try:
            asyncio.run(get_backend(name, folder / "sandboxes").probe())
        except BackendUnavailable as error:
            problems.append(f"{name}: {error}")
        else:
            os.environ["PRORL_SANDBOX_BACKEND"] = name
            return
    say(f"no sandboxes on this machine, so rollouts that need one will fail ({'; '.join(problems)})")
    os.environ["PRORL_SANDBOX_BACKEND"] = "none"


def _leave_settings(folder: Path) -> None:
    """So that `manage.py` in another terminal talks to the same platform without any variables set."""
    names = [
        *("PRORL_VAR_DIR", "PRORL_DATABASE_URL", "PRORL_SECRET_KEY_FILE", "PRORL_BROKER_URL", "PRORL_SANDBOX_BACKEND"),
        *("PRORL_GATEWAY_PORT", "PRORL_GATEWAY_URL"),
    ]
    path = folder / "prorl.env"
    path.touch(mode=0o600)
    path.write_text("".join(f"{name}={os.environ[name]}\n" for name in names if os.environ.get(name)))


def _migrate(say: Say) -> None:
    import django
    from django.core.management import call_command
    from django.db import connection

    django.setup()
    call_command("migrate", verbosity=0)
    connection.close()
    say("database migrated")


def _administrator(folder: Path) -> tuple[str, str]:
    """A superuser `admin` whose password is kept in var/, unless the site has superusers already."""
    from django.contrib.auth import get_user_model

    users = get_user_model().objects
    kept = folder / "admin_password"
    if not users.filter(is_superuser=True).exists():
        kept.unlink(missing_ok=True)
        users.create_superuser("admin", password=_kept_secret(kept).read_text())
    return "admin", kept.read_text() if kept.exists() else "(as you set it)"


def _services(port: int) -> list[Service]:
    web = Service(
        name="web",
        command=[
            *(sys.executable, "-m", "uvicorn", "prorl_site.asgi:application"),
            *("--host", "127.0.0.1", "--port", str(port), "--lifespan", "off"),
            *("--no-access-log", "--log-level", "warning", "--timeout-graceful-shutdown", "1"),
        ],
        ready=lambda: http_answers(f"http://127.0.0.1:{port}/login/"),
        stop_order=_WEB_STOPS,
    )
    dispatcher = Service(name="dispatcher", command=_manage("dispatch"), stop_order=_WORKERS_STOP)
    sender = Service(name="webhooks", command=_manage("deliver"), stop_order=_WORKERS_STOP)
    maintenance = Service(name="maintenance", command=_manage("maintain"), stop_order=_WORKERS_STOP)
    gateway = Service(
        name="gateway",
        command=_manage("gateway"),
        ready=lambda: http_answers(f"http://127.0.0.1:{os.environ['PRORL_GATEWAY_PORT']}/readyz"),
        stop_order=_WORKERS_STOP,
    )
    return [
        web,
        dispatcher,
        sender,
        maintenance,
        gateway,
        *(_worker(stage, concurrency) for stage, concurrency in CONCURRENCY.items()),
    ]


def _worker(stage: str, concurrency: int) -> Service:
    return Service(
        name=f"worker-{stage}",
        command=_manage("work", stage, "--concurrency", str(concurrency)),
        ready=lambda: _is_registered(stage),
        stop_order=_WORKERS_STOP,
    )


def _manage(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "django", *arguments]


def _is_registered(stage: str) -> bool:
    from django.conf import settings
    from django.db import connection
    from django.utils import timezone

    from rollouts.models import WorkerProcess

    try:
        # A killed predecessor's row looks alive until its lease runs out; only a process that exists counts.
        live = WorkerProcess.objects.filter(node=settings.NODE, stage=stage, stopped_at=None, lost_at=None)
        pids = live.filter(lease_expires_at__gt=timezone.now()).values_list("pid", flat=True)
        return any(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        connection.close()


def _stop_sandboxes() -> None:
    """Sandboxes outlive their workers by design; with the platform gone nobody needs them."""
    from django.conf import settings

    async def stop_all() -> None:
        backend = get_backend(settings.SANDBOX_BACKEND, settings.SANDBOX_DIR, settings.SANDBOX_OPTIONS)
        await asyncio.gather(*(backend.stop(name) for name in await backend.list()))

    asyncio.run(stop_all())
