"""Runs the services of one machine: starts them, restarts those that crash, and stops them all, in order, within seconds.

    with Supervisor(var_dir, say=print) as supervisor:
        supervisor.start(postgres.service())
        supervisor.start(web, *workers)     # started together, returns when all are ready
        supervisor.wait()                   # until Ctrl-C or SIGTERM

Leaving the block stops everything. The first Ctrl-C or SIGTERM is an orderly stop, the second one kills. No service survives
the supervisor, whatever ends it (see leash.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any, Self

from prorl_site.embedded.processes import LeashedProcess, wait_until

STOP_SECONDS = 4.0  # all services together; what still runs then is killed, so that Ctrl-C takes less than five
LAST_WAVE_SECONDS = 1.2  # kept back for the services that stop last (the database)
FIRST_RESTART_SECONDS = 0.5
SLOWEST_RESTART_SECONDS = 30.0
SETTLED_SECONDS = 60.0  # a service that ran this long before it crashed starts again with the shortest pause
WATCH_INTERVAL_SECONDS = 0.1
READY_INTERVAL_SECONDS = 0.05
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed

Say = Callable[[str], None]


class SupervisorError(Exception):
    """The services cannot be started; the message is for a person."""


class AlreadyRunning(SupervisorError):
    """Another supervisor holds this folder."""


class ServiceFailed(SupervisorError):
    """A service ended, or was not ready in time, while it was being started."""


class StopRequested(BaseException):
    """Raised in the main thread by the first Ctrl-C or SIGTERM; `Supervisor` swallows it on leaving its block."""


@dataclass(frozen=True)
class Service:
    """A program to keep running."""

    name: str  # also names its log: var/log/<name>.log
    command: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)  # added to the supervisor's own
    ready: Callable[[], bool] = lambda: True  # asked until true
    ready_seconds: float = 60.0
    stop_order: int = 0  # lower stops first; equal ones together
    stop_signal: signal.Signals = signal.SIGTERM


@dataclass
class _Running:
    service: Service
    process: LeashedProcess
    started: float
    watched: bool = False  # from when it was ready: until then a crash is a failed start, not something to restart
    crashes: int = 0
    restart_at: float | None = None


class Supervisor:
    """See the module. One per `var_dir`; `say` gets one line per event."""

    def __init__(self, var_dir: Path, *, say: Say = print) -> None:
        self._var_dir = var_dir
        self._say = say
        self._running: list[_Running] = []
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="supervisor", daemon=True)
        self._lock_file: IO[str] | None = None
        self._old_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self._take_lock()
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._old_handlers[number] = signal.signal(number, self._on_signal)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        self.stop()
        return isinstance(error, StopRequested)

    def start(self, *services: Service) -> None:
        """Starts `services` together and returns when all are ready.

        Raises:
            ServiceFailed: one ended or was not ready in time; the message ends with its last log lines.
        """
        begun = time.monotonic()
        starting = [_Running(service, self._spawn(service), time.monotonic()) for service in services]
        self._running += starting
        for running in starting:
            self._await_ready(running, begun)

    def wait(self) -> None:
        """Blocks until Ctrl-C or SIGTERM (which leave the block by an exception that the block swallows)."""
        while True:
            signal.pause()

    def stop(self) -> None:
        """Stops all services, the lowest `stop_order` first, within `STOP_SECONDS`. May be called again."""
        if self._lock_file is None:
            return
        self._stopping.set()
        self._watcher.join()
        begun = time.monotonic()
        waves = sorted({running.service.stop_order for running in self._running})
        for wave in waves:
            reserve = 0.0 if wave == waves[-1] else LAST_WAVE_SECONDS
            self._stop_wave([r for r in self._running if r.service.stop_order == wave], begun + STOP_SECONDS - reserve)
        if self._running:
            self._say(f"stopped {len(self._running)} services in {time.monotonic() - begun:.1f} s")
        self._running.clear()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        self._lock_file.close()
        self._lock_file = None

    def _spawn(self, service: Service) -> LeashedProcess:
        return LeashedProcess(service.command, log=self._var_dir / "log" / f"{service.name}.log", env=service.env)

    def _await_ready(self, running: _Running, begun: float) -> None:
        service = running.service

        def settled() -> bool:
            return running.process.poll() is not None or service.ready()

        in_time = wait_until(settled, timeout=begun + service.ready_seconds - time.monotonic(), interval=READY_INTERVAL_SECONDS)
        seconds = time.monotonic() - begun
        if (status := running.process.poll()) is not None:
            raise ServiceFailed(f"{service.name} ended with status {status}:\n{running.process.log_tail()}")
        if not in_time:
            raise ServiceFailed(f"{service.name} was not ready after {seconds:.0f} s:\n{running.process.log_tail()}")
        running.watched = True
        self._say(f"{service.name} ready in {seconds:.1f} s")

    def _watch(self) -> None:
        while not self._stopping.wait(WATCH_INTERVAL_SECONDS):
            for running in list(self._running):
                if running.watched:
                    self._revive(running)

    def _revive(self, running: _Running) -> None:
        now = time.monotonic()
        name = running.service.name
        if running.restart_at is not None:
            if now >= running.restart_at:
                running.process, running.started, running.restart_at = self._spawn(running.service), now, None
                self._say(f"{name} started again")
        elif (status := running.process.poll()) is not None:
            running.process.kill()  # it has ended; this gives back its descriptor
            running.crashes = 1 if now - running.started > SETTLED_SECONDS else running.crashes + 1
            pause = min(FIRST_RESTART_SECONDS * 2 ** (running.crashes - 1), SLOWEST_RESTART_SECONDS)
            running.restart_at = now + pause
            self._say(f"{name} ended with status {status}, next start in {pause:.1f} s (see {running.process.log})")

    def _stop_wave(self, wave: list[_Running], deadline: float) -> None:
        for running in wave:
            running.process.signal(running.service.stop_signal)
        for running in wave:
            if not running.process.wait(deadline - time.monotonic()):
                self._say(f"{running.service.name} did not stop in time and was killed")
            running.process.kill()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._stopping.is_set():
            self._say("killing everything")
            for running in self._running:
                running.process.cut_lifeline()
            return
        self._stopping.set()
        raise StopRequested

    def _take_lock(self) -> None:
        self._var_dir.mkdir(parents=True, exist_ok=True)
        path = self._var_dir / "supervisor.lock"
        path.touch(mode=0o600)
        lock_file = path.open("r+")
        try:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            with contextlib.closing(lock_file):
                raise AlreadyRunning(f"already running in {self._var_dir} (process {lock_file.read().strip()})") from None
        lock_file.truncate()
        lock_file.write(f"{os.getpid()}\n")
        lock_file.flush()
        self._lock_file = lock_file
