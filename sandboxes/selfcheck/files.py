"""The file verbs."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from sandboxes.errors import SandboxFileError
from sandboxes.protocol import Limits, SandboxSpec, Session
from sandboxes.selfcheck.framework import Bench, CheckFailed, check, expect, expect_equal, expect_output


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


_MEGABYTE = bytes(range(256)) * 4096


async def _pieces(count: int, *, fails: bool = False) -> AsyncIterator[bytes]:
    for number in range(count):
        yield number.to_bytes(8, "big") + _MEGABYTE[8:]
    if fails:
        raise KeyError("the source broke")


async def _drop(session: Session, path: str) -> None:
    async for _ in session.download(path):
        pass


@check("files of any size go in and out in pieces, every byte as it was")
async def streams_large_files(bench: Bench) -> None:
    digest = hashlib.sha256()
    async for piece in _pieces(40):
        digest.update(piece)
    async with bench.sandbox() as session:
        await session.upload("/tmp/new/large", _pieces(40))
        expect_output(await session.bash("sha256sum < /tmp/new/large", timeout=20), f"{digest.hexdigest()}  -\n")
        received, largest = hashlib.sha256(), 0
        async for piece in session.download("/tmp/new/large"):
            received.update(piece)
            largest = max(largest, len(piece))
        expect_equal(received.hexdigest(), digest.hexdigest(), "the digest of what came back")
        expect(largest <= 1024 * 1024, f"a piece has {largest} bytes")
        await session.upload("/tmp/new/large", _pieces(0))
        expect_equal([piece async for piece in session.download("/tmp/new/large")], [], "the pieces of an empty file")


@check("transfers go on side by side with commands, and one that is given up half-way holds up nothing")
async def multiplexes_transfers(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.upload("/tmp/large", _pieces(20))
        async with aclosing(session.download("/tmp/large")) as pieces:
            expect_equal(len(await anext(pieces)), 1024 * 1024, "the size of the first piece")
            expect_output(await session.bash("echo beside", timeout=5), "beside\n")
            expect_equal(sum([len(piece) async for piece in session.download("/tmp/large")]), 20 << 20, "another download")
        expect_output(await session.bash("echo after", timeout=5), "after\n")


@check("an upload replaces its file at its end: its mode stays, links are followed, and a broken one leaves nothing")
async def replaces_whole_files(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("mkdir /tmp/u; cd /tmp/u; echo old > f; chmod 751 f; ln -s f link", timeout=5)
        try:
            await session.upload("/tmp/u/f", _pieces(10, fails=True))
        except KeyError:
            pass
        else:
            raise CheckFailed("the source's error was swallowed")
        expect_output(await session.bash("cat f; ls -A1", timeout=5), "old\nf\nlink\n")
        await session.upload("/tmp/u/link", _pieces(1))
        expect_output(await session.bash("stat -c %a:%s f; readlink link; ls -A1", timeout=5), "751:1048576\nf\nf\nlink\n")


@check("transfers fail for the same reasons as short files do, at their beginning or in the middle")
async def explains_failed_transfers(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(limits=Limits(file_size_mb=6, disk_mb=10))) as session:
        await session.bash("cd /tmp; mkdir d; mkfifo p; ln -s loop loop; echo text > f; chmod 0 f", timeout=5)
        cases: list[tuple[Callable[[], Awaitable[object]], str, str]] = [
            (lambda: _drop(session, "/tmp/none"), "not_found", "downloading a missing file"),
            (lambda: _drop(session, "/tmp/d"), "is_directory", "downloading a directory"),
            (lambda: _drop(session, "/tmp/p"), "not_a_file", "downloading a pipe"),
            (lambda: _drop(session, "/dev/zero"), "not_a_file", "downloading a device"),
            (lambda: _drop(session, "/tmp/f"), "permission", "downloading a protected file"),
            (lambda: session.upload("/tmp/d", _pieces(1)), "is_directory", "uploading to a directory"),
            (lambda: session.upload("/tmp/p", _pieces(1)), "not_a_file", "uploading to a pipe"),
            (lambda: session.upload("/tmp/loop", _pieces(1)), "other", "uploading to a link to itself"),
            (lambda: session.upload("/tmp/f", _pieces(1)), "permission", "uploading to a protected file"),
            (lambda: session.upload("/usr/x", _pieces(1)), "permission", "uploading to /usr"),
            (lambda: session.upload("/tmp/big", _pieces(8)), "too_large", "uploading too much"),
        ]
        for call, reason, what in cases:
            await _expect_reason(call(), reason, what)
        await session.upload("/tmp/one", _pieces(6))
        await _expect_reason(session.upload("/tmp/two", _pieces(6)), "no_space", "uploading beyond the disk limit")
        expect_output(await session.bash("ls -A1 /tmp", timeout=5), "d\nf\nloop\none\np\n")


@check("names of any bytes survive listing, reading and writing")
async def keeps_names(bench: Bench) -> None:
    async with bench.sandbox() as session:
        files = r"""$'\xff\xfe' $'new\nline' 'é "'"""
        await session.bash(f'mkdir /tmp/n; cd /tmp/n; for f in {files}; do printf 1 > "$f"; done', timeout=5)
        names = [entry.path for entry in await session.list_files("/tmp/n")]
        expect_equal(names, ["/tmp/n/new\nline", '/tmp/n/é "', "/tmp/n/\udcff\udcfe"], "the names")
        for name in names:
            expect_equal(await session.read_file(name), b"1", f"what {name!r} has")
            await session.write_file(name + "\udc80", b"2")
            await session.upload(name + "\udc80", _pieces(0))
        expect_equal(len(await session.list_files("/tmp/n")), 6, "the number of files")
