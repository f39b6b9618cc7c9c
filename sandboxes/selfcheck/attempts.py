"""Things that must be refused inside a sandbox, tried there; and what of a sandbox is seen from the host."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

from sandboxes.protocol import Session
from sandboxes.selfcheck.framework import CheckFailed, expect, expect_equal, host_processes_with, marker, value_of

# Each attempt runs in a child of its own: one that succeeds may have changed its process beyond use.
_SCRIPT = """
import ctypes, fcntl, os, platform, resource, signal, socket, struct, subprocess, sys, termios, traceback
libc = ctypes.CDLL(None, use_errno=True)
numbers = {
    "add_key": (248, 217), "bpf": (321, 280), "fsopen": (430, 430), "io_uring_setup": (425, 425), "keyctl": (250, 219),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "open_by_handle_at": (304, 265), "open_tree": (428, 428),
    "perf_event_open": (298, 241), "pidfd_getfd": (438, 438), "pivot_root": (155, 41), "request_key": (249, 218),
    "userfaultfd": (323, 282), "clone": (56, 220), "clone3": (435, 435), "kcmp": (312, 272),
}
def call(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def syscall(name, *arguments):
    return call(libc.syscall(numbers[name][platform.machine() != "x86_64"], *arguments))
results = {}
for what, code in attempts.items():
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(10)
        try:
            exec(code)
            status = 0
        except OSError:
            status = 33
        except BaseException:
            traceback.print_exc()
        os._exit(status)
    results[what] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
results
"""
_DENIED = 33


async def expect_denied(session: Session, attempts: Mapping[str, str]) -> None:
    """Each attempt is Python code that raises OSError when it is refused, by a name that says what it did otherwise.

    `call(x)` and `syscall(name, ...)` raise it for a negative result; `libc` and the usual modules are there.
    """
    results = await value_of(session, f"attempts = {dict(attempts)!r}\n{_SCRIPT}")
    broken = {what: code for what, code in results.items() if code not in (0, _DENIED)}
    expect(not broken, f"attempts that neither succeeded nor were refused: {broken}")
    expect_equal([what for what, code in results.items() if code == 0], [], "the list of what succeeded")


@contextlib.contextmanager
def host_file(directory: Path) -> Iterator[tuple[Path, str]]:
    """A file on the host that everybody may read and write, and its contents. Raises OSError."""
    secret = marker()
    path = directory / f"prorl-selfcheck-{secrets.token_hex(6)}"
    path.write_text(secret)
    try:
        path.chmod(0o666)
        yield path, secret
    finally:
        path.unlink()


async def start_marked(session: Session, text: str) -> int:
    """Start a process inside that sleeps, with `text` among its arguments; its pid on the host."""
    await session.bash(f"bash -c 'exec -a {text} sleep 600' </dev/null >/dev/null 2>&1 &", timeout=10)
    for _ in range(200):
        if found := host_processes_with(text):
            return found[0]
        await asyncio.sleep(0.05)
    raise CheckFailed("the process did not come up")


def host_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
