"""The directory of a sandbox that an agent works in: filled before, read afterwards, whatever the agent has made of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from posixpath import join

from rollouts.engine.errors import EnvironmentFailed, EvaluationFailed
from sandboxes.errors import SandboxFileError
from sandboxes.protocol import Session

_SECONDS = 30.0
_PATCH_BYTES = 5_000_000
_BASE = "refs/prorl/base"
_PATCH_FILE = "/tmp/prorl/patch"  # noqa: S108 - the sandbox's own
# All files as a tree of git, whatever HEAD and the index are: agents commit, stage and switch branches.
_GIT = "git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.quotePath=true"
_SNAPSHOT = f"export GIT_INDEX_FILE=/tmp/prorl/index; rm -f $GIT_INDEX_FILE; {_GIT} add -A . && tree=$({_GIT} write-tree)"


class Workspace:
    """`folder` is absolute or below the sandbox's home. `problems` tells what could not be read."""

    def __init__(self, sandbox: Session, folder: str) -> None:
        self.problems: list[str] = []
        self._sandbox = sandbox
        self._folder = folder

    async def prepare(self, files: Mapping[str, str], *, versioned: bool) -> None:
        """Make it and put files into it; with `versioned`, remember what it is like now. Raises EnvironmentFailed."""
        await self._prepared(f"mkdir -p /tmp/prorl {shlex.quote(self._folder)}")
        await self.write(files)
        if versioned:
            remember = f"git rev-parse --git-dir >/dev/null 2>&1 || git init -q\n{_SNAPSHOT} && git update-ref {_BASE} $tree"
            await self._prepared(self._inside(remember))

    async def write(self, files: Mapping[str, str]) -> None:
        for path, text in files.items():
            await self._sandbox.write_file(join(self._folder, path), text.encode())

    async def read(self, path: str, *, max_bytes: int = 1_000_000) -> str | None:
        """A file as text, None when there is none that can be read. An absolute path may lead out of the directory."""
        try:
            data = await self._sandbox.read_file(join(self._folder, path), max_bytes=max_bytes)
        except SandboxFileError as exc:
            if exc.reason != "not_found":
                self.problems.append(str(exc))
            return None
        return data.decode(errors="replace")

    async def tail(self, path: str, *, chars: int) -> str:
        """The end of a file outside of it."""
        result = await self._sandbox.bash(f"tail -c {chars} {shlex.quote(path)}", timeout=_SECONDS)
        return result.output[-chars:]

    async def patch(self) -> str | None:
        """What has changed since `prepare`, for `git apply`; None when git cannot tell."""
        command = f"{_SNAPSHOT}\n{_GIT} diff --binary --no-ext-diff --no-textconv --no-color {_BASE} $tree >{_PATCH_FILE}"
        result = await self._sandbox.bash(self._inside(command), timeout=_SECONDS)
        if result.exit_code == 0:
            try:
                return (await self._sandbox.read_file(_PATCH_FILE, max_bytes=_PATCH_BYTES)).decode(errors="replace")
            except SandboxFileError as exc:
                self.problems.append(str(exc))
                return None
        self.problems.append(f"no patch: {result.output.strip()[-300:]}")
        return None

    async def apply(self, patch: str) -> None:
        """Make the changes of a patch that `patch` made. Raises EvaluationFailed."""
        if not patch:
            return
        await self._sandbox.write_file(_PATCH_FILE, patch.encode())
        command = f"git init -q 2>/dev/null; {_GIT} apply --whitespace=nowarn {_PATCH_FILE}"
        result = await self._sandbox.bash(self._inside(command), timeout=_SECONDS)
        if result.exit_code != 0:
            raise EvaluationFailed(f"the patch does not apply: {result.output.strip()[-300:]}")

    def _inside(self, command: str) -> str:
        return f"(cd {shlex.quote(self._folder)} || exit 1\n{command}\n)"

    async def _prepared(self, command: str) -> None:
        result = await self._sandbox.bash(command, timeout=_SECONDS)
        if result.exit_code != 0:
            raise EnvironmentFailed(f"preparing {self._folder} failed: {result.output.strip()[-300:]}")
