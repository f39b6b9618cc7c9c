"""Sandboxes as Apptainer instances, for administrators who want to see and end them with Apptainer's commands. No Django.

The instance has the name of the sandbox behind a prefix of this state directory; the broker's `exec` enters it. Process 1 is
then Apptainer's, so that an agent can kill its broker: the sandbox is lost, and nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sandboxes.backends.apptainer.arguments import Container
from sandboxes.backends.apptainer.launch import Entry
from sandboxes.backends.apptainer.processes import kill_sessions, session_of
from sandboxes.backends.apptainer.program import Program
from sandboxes.backends.apptainer.spython_calls import Caller, SpythonFailed, instances, start_instance, version
from sandboxes.backends.bwrap_program import HOME
from sandboxes.backends.host_processes import all_pids, arguments_of, user_of
from sandboxes.backends.staging import shared_folder
from sandboxes.backends.state import Place
from sandboxes.errors import BackendUnavailable, SandboxStartFailed, TeardownFailed

_NAME = "instance"  # in the sandbox's directory: its instance's name, which stays when the sandbox gets another one
_START_TIMEOUT = 60.0
_TITLE = re.compile(rb"^(?:Apptainer|Singularity) instance: \S+ \[([^\]]+)\]$")


class Instances:
    """Those of one state directory; `program` is the Apptainer, `user` the host user of the sandboxes, None for our own."""

    def __init__(self, state_dir: Path, program: Program, user: int | None) -> None:
        self._prefix = f"prorl-{hashlib.sha256(str(state_dir.resolve()).encode()).hexdigest()[:8]}-"
        self._state_dir = state_dir
        self._program = program
        self._user = user

    @property
    def config(self) -> Path:
        """Where Apptainer lists them: the usual place, or for `user`, who may have no home, a folder of ours."""
        if self._user is None:
            return Path.home() / (".apptainer" if self._program.product == "apptainer" else ".singularity")
        folder = shared_folder() / "instances"
        folder.mkdir(mode=0o700, exist_ok=True)
        os.chown(folder, self._user, self._user)
        return folder

    async def check(self) -> None:
        """Raises BackendUnavailable when spython cannot be used."""
        with self._folder() as work:
            try:
                await version(Caller(self._program.path, work, self._user, self.config))
            except SpythonFailed as error:
                raise BackendUnavailable(f"PRORL_APPTAINER_INSTANCES needs the Python package spython: {error}") from error

    async def start(self, place: Place, container: Container, work: Path) -> Entry:
        """Start the sandbox's instance, for the broker to enter it. Raises SandboxStartFailed."""
        name = self._prefix + place.name
        (place.directory / _NAME).write_text(name)  # before it is there: `end` looks for it
        caller = Caller(self._program.path, work, self._user, self.config, container.program)
        try:
            await start_instance(caller, container.image, name, container.options, timeout=_START_TIMEOUT)
        except SpythonFailed as error:
            raise SandboxStartFailed(f"{place.name}: {error}") from error
        return Entry([self._program.path, "--quiet", "exec", "--pwd", HOME, f"instance://{name}"], work, self.config)

    def end(self, place: Place, timeout: float) -> list[int]:
        """Kill the sandbox's instance with all that lives in it; returns the pids that are still there. Blocks."""
        try:
            name = (place.directory / _NAME).read_text()
        except FileNotFoundError:
            return []
        return self._kill(name, timeout)

    def end_stray(self, name: str, timeout: float) -> list[int]:
        """The same for an instance of ours whose sandbox has no directory any more."""
        return self._kill(self._prefix + name, timeout)

    def strays(self) -> set[str]:
        """Names of sandboxes that have an instance, but no directory."""
        recorded = set()
        for path in self._state_dir.glob(f"*/{_NAME}"):
            with contextlib.suppress(FileNotFoundError):  # stopped meanwhile
                recorded.add(path.read_text())
        names = {name for name, _ in self._running() if name.startswith(self._prefix)}
        return {name.removeprefix(self._prefix) for name in names - recorded}

    async def check_gone(self, name: str) -> None:
        """Have Apptainer list its instances, which also makes it forget those that ended. Raises TeardownFailed."""
        with self._folder() as work:
            try:
                listed = await instances(Caller(self._program.path, work, self._user, self.config))
            except SpythonFailed as error:
                raise TeardownFailed(f"{name}: {error}") from error
        if self._prefix + name in listed:
            raise TeardownFailed(f"{name}: its instance is still listed by {self._program.path}")
        for log in self.config.glob(f"instances/logs/*/*/{self._prefix}{name}.*"):
            log.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _folder(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory() as work:
            if self._user is not None:
                os.chown(work, self._user, self._user)
            yield Path(work)

    def _kill(self, name: str, timeout: float) -> list[int]:
        return kill_sessions({session for title, session in self._running() if title == name}, set(), timeout)

    def _running(self) -> set[tuple[str, int]]:
        """(name, session) of all instances of our sandboxes' user.

        A name may come with several sessions: an agent, too, can give its processes such a title.
        """
        user = os.geteuid() if self._user is None else self._user
        found = set()
        for pid in all_pids():
            title = _TITLE.match(b" ".join(arguments_of(pid)))
            session = session_of(pid)
            if title and session is not None and user_of(pid) == user:
                found.add((title[1].decode(errors="replace"), session))
        return found
