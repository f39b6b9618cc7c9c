"""The file verbs."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
from collections.abc import Awaitable, Callable

from sandboxes.errors import SandboxFileError
from sandboxes.protocol import Limits, SandboxSpec
from sandboxes.selfcheck.framework import Bench, CheckFailed, check, expect_equal, expect_output


async def _expect_reason(call: Awaitable[object], reason: str, what: str) -> None:
    try:
        await call
    except SandboxFileError as error:
        expect_equal(error.reason, reason, f"the reason for {what}")
        return
    raise CheckFailed(f"{what} succeeded")


@check("every byte value comes back as written, and parent directories are made")
async def keeps_bytes(bench: Bench) -> None:
    data = bytes(range(256)) * 4096
    async with bench.sandbox() as session:
        await session.write_file("/tmp/a/b/c.bin", data)
        expect_equal(await session.read_file("/tmp/a/b/c.bin") == data, True, "equality of what was read")
        await session.write_file("/tmp/a/b/c.bin", b"")
        expect_equal(await session.read_file("/tmp/a/b/c.bin"), b"", "the replaced file")


@check("relative paths and ~ mean the home directory, and files belong to the agent")
async def starts_at_home(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.write_file("x.sh", b"echo ok\n")
        expect_output(await session.bash("cd; test -O x.sh && sh x.sh", timeout=5), "ok\n")
        expect_equal(await session.read_file("~/x.sh"), b"echo ok\n", "the file read as ~/x.sh")


@check("each failure has its reason: missing, directory, not a directory, not regular, permission, size")
async def explains_failures(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("cd /tmp; mkdir d; echo text > f; mkfifo p; echo s > s; chmod 0 s", timeout=5)
        cases: list[tuple[Callable[[], Awaitable[object]], str, str]] = [
            (lambda: session.read_file("/tmp/none"), "not_found", "reading a missing file"),
            (lambda: session.read_file("/tmp/d"), "is_directory", "reading a directory"),
            (lambda: session.write_file("/tmp/d", b""), "is_directory", "writing a directory"),
            (lambda: session.write_file("/tmp/f/x", b""), "not_a_directory", "writing below a file"),
            (lambda: session.read_file("/tmp/p"), "not_a_file", "reading a pipe"),
            (lambda: session.write_file("/tmp/p", b""), "not_a_file", "writing a pipe"),
            (lambda: session.read_file("/dev/zero"), "not_a_file", "reading a device"),
            (lambda: session.read_file("/tmp/s"), "permission", "reading a protected file"),
            (lambda: session.write_file("/usr/x", b""), "permission", "writing to /usr"),
            (lambda: session.read_file("/tmp/f", max_bytes=2), "too_large", "reading more than allowed"),
            (lambda: session.list_files("/tmp/none"), "not_found", "listing a missing directory"),
            (lambda: session.list_files("/tmp/f"), "not_a_directory", "listing a file"),
        ]
        for call, reason, what in cases:
            await _expect_reason(call(), reason, what)


@check("`..` and links lead nowhere but into the sandbox")
async def stays_inside(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("ln -s /etc/passwd /tmp/link; ln -s /tmp/loop /tmp/loop", timeout=5)
        inside = await session.read_file("/etc/passwd")
        expect_equal(await session.read_file("/tmp/../../../../etc/passwd"), inside, "what `..` leads to")
        expect_equal(await session.read_file("/tmp/link"), inside, "what the link leads to")
        await _expect_reason(session.read_file("/tmp/loop"), "other", "reading a link to itself")


@check("a listing has kind and size of each entry, and does not follow links")
async def lists_entries(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("mkdir -p /tmp/l/d; cd /tmp/l; printf 12345 > f; ln -s /nowhere s; mkfifo p", timeout=5)
        entries = [(entry.path, entry.kind) for entry in await session.list_files("/tmp/l")]
        expected = [("/tmp/l/d", "directory"), ("/tmp/l/f", "file"), ("/tmp/l/p", "other"), ("/tmp/l/s", "symlink")]
        expect_equal(entries, expected, "the listing")
        sizes = {entry.path: entry.size for entry in await session.list_files("/tmp/l")}
        expect_equal(sizes["/tmp/l/f"], 5, "the size of a file")


@check("writing obeys the file size limit and the disk limit")
async def obeys_limits(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(file_size_mb=2, disk_mb=3))) as session:
        megabyte = b"x" * 1024 * 1024
        await _expect_reason(session.write_file("/tmp/big", 3 * megabyte), "too_large", "writing 3 MiB")
        await session.write_file("/tmp/one", 2 * megabyte)
        await _expect_reason(session.write_file("/tmp/two", 2 * megabyte), "no_space", "writing beyond the disk limit")
