"""Images, instances and inspection through spython, each call bounded and checked. No Django.

spython waits without a limit, and reports success where there was none: so every call is a process of ours with a timeout, its
output goes to a file, and what it should have brought about is looked at afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from sandboxes.backends.apptainer.program import environment
from sandboxes.errors import SandboxError

_CHILD = "sandboxes.backends.apptainer.spython_child"
# Before and after it does what it is told, spython also asks for the version and for instances. Of a build it reads only what
# goes to standard output, and would wait for ever once much went to the other one.
_WRAPPER = """#!/bin/sh
case " $* " in
*" instance start "*) exec {starting} "$@" ;;
" build "*) exec {plain} "$@" 2>&1 ;;
*) exec {plain} "$@" ;;
esac
"""
_QUICK = 30.0  # seconds for what only asks
_POLL = 0.1
_TAIL = 2000


class SpythonFailed(SandboxError):
    """A call failed, did not end in time, or did not bring about what it should. The message has the end of its output."""


@dataclass(frozen=True)
class Caller:
    """Who calls: `program` is the path, `user` the host user that it runs as, None for our own.

    The program keeps its files below `work`, which that user can write; `config` is where it lists instances; `starting` is
    the command that stands for it to start one.
    """

    program: str
    work: Path
    user: int | None = None
    config: Path | None = None
    starting: Sequence[str] = ()


@dataclass(frozen=True)
class _Answer:
    """What a call returned, and the end of what was printed meanwhile."""

    result: Any
    output: str

    def __str__(self) -> str:
        return f"{self.result}; {self.output}"[-_TAIL:]


async def version(caller: Caller) -> str:
    """What `--version` says. Raises SpythonFailed."""
    answer = await _call(caller, "version", {}, timeout=_QUICK)
    if "version" not in str(answer.result):
        raise SpythonFailed(f"version: {answer}")
    return str(answer.result)


async def labels_of(caller: Caller, image: Path) -> dict[str, str]:
    """The labels of an image file. Raises SpythonFailed for what is no image."""
    answer = await _call(caller, "inspect", {"image": str(image)}, timeout=_QUICK)
    if not isinstance(answer.result, dict) or "attributes" not in answer.result:
        raise SpythonFailed(f"inspect: {image} is no image: {answer}")
    labels = answer.result["attributes"].get("labels") or {}
    return {str(name): str(value) for name, value in labels.items()}


async def build_image(
    caller: Caller, source: str, target: Path, *, timeout: float, on_line: Callable[[str], None] | None = None
) -> dict[str, str]:
    """Build the SIF file `target`, which is replaced, from a definition file or a directory, and return its labels.

    `on_line` gets what is printed, as it comes. Raises SpythonFailed.
    """
    target.unlink(missing_ok=True)
    options = ["--fakeroot"] if os.geteuid() != 0 or caller.user is not None else []
    arguments = {"source": source, "target": str(target), "options": options}
    answer = await _call(caller, "build", arguments, timeout=timeout, on_line=on_line)
    if not target.is_file():
        raise SpythonFailed(f"build: {target} is not there: {answer}")
    return await labels_of(caller, target)


async def start_instance(caller: Caller, image: str, name: str, options: list[str], *, timeout: float) -> None:
    """Raises SpythonFailed, also when it is not listed afterwards."""
    answer = await _call(caller, "start", {"image": image, "name": name, "options": options}, timeout=timeout)
    if name not in await instances(caller):
        raise SpythonFailed(f"start: instance {name} is not listed: {answer}")


async def instances(caller: Caller) -> set[str]:
    """Names of the instances of the caller's user."""
    answer = await _call(caller, "instances", {}, timeout=_QUICK)
    if not isinstance(answer.result, list):
        raise SpythonFailed(f"instances: {answer}")
    return {str(instance["instance"]) for instance in answer.result}


async def _call(
    caller: Caller,
    name: str,
    arguments: Mapping[str, Any],
    *,
    timeout: float,
    on_line: Callable[[str], None] | None = None,
) -> _Answer:
    request = json.dumps({"call": name, "user": caller.user, "arguments": arguments}).encode()
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as result, tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        program = Path(folder) / "singularity"  # the only name that spython knows
        starting = shlex.join(caller.starting or [caller.program])
        program.write_text(_WRAPPER.format(plain=shlex.quote(caller.program), starting=starting))
        program.chmod(0o755)
        variables = environment(caller.work, caller.config)
        variables |= {"PATH": f"{folder}:{variables['PATH']}", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", _CHILD, str(result.fileno())),
            stdin=asyncio.subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[result.fileno()],
            cwd="/",
            env=variables,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(timeout):
                await process.communicate(request) if on_line is None else await _follow(process, request, output, on_line)
        except TimeoutError:
            raise SpythonFailed(f"{name}: no end within {timeout:g} s: {_tail(output)}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if process.returncode != 0:
            raise SpythonFailed(f"{name}: exit code {process.returncode}: {_tail(output)}")
        result.seek(0)
        return _Answer(json.load(result), _tail(output))


async def _follow(
    process: asyncio.subprocess.Process, request: bytes, output: IO[bytes], on_line: Callable[[str], None]
) -> None:
    ended = asyncio.ensure_future(process.communicate(request))
    rest, offset = b"", 0
    while True:
        done, _ = await asyncio.wait([ended], timeout=_POLL)
        while data := os.pread(output.fileno(), 1 << 16, offset):
            offset += len(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                on_line(line.decode(errors="replace"))
        if done:
            break
    if rest:
        on_line(rest.decode(errors="replace"))
    ended.result()


def _tail(output: IO[bytes]) -> str:
    size = os.fstat(output.fileno()).st_size
    return os.pread(output.fileno(), _TAIL, max(0, size - _TAIL)).decode(errors="replace").strip()
