"""The broker and its channel, which the agent must neither reach nor harm; and other sandboxes."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
# ruff: noqa: S108
from sandboxes.broker.descriptors import CELL_CHANNEL, CELL_SOURCE
from sandboxes.errors import SandboxFileError
from sandboxes.selfcheck.attempts import expect_denied, start_marked
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal, expect_output, marker
from sandboxes.selfcheck.kernel import tracing

_OPEN = "import os, resource\nfound = []\nfor fd in range(resource.getrlimit(resource.RLIMIT_NOFILE)[0]):\n"
_OPEN += "    try: os.fstat(fd); found.append(fd)\n    except OSError: pass\n"


@check("the broker cannot be killed, traced, starved or looked into from inside")
async def is_out_of_reach(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("for s in $(seq 1 64); do [ $s = 17 ] || kill -$s 1; done 2>/dev/null", timeout=5)
        attempts = {
            "slowing all down": "os.setpriority(os.PRIO_USER, 0, 19)",
            "having it ended first when memory runs out": "open('/proc/1/oom_score_adj', 'r+b', 0).write(b'1000')",
        }
        await expect_denied(session, tracing(1) | attempts)
        await session.bash("kill -9 -1; kill -STOP 1", timeout=5)
        expect_output(await session.bash("echo back", timeout=5), "back\n")
        expect(await session.ping() < 5, "the broker does not answer")


@check("what the agent runs stands behind its broker for the processor")
async def goes_first(bench: Bench) -> None:
    async with bench.sandbox() as session:
        result = await session.bash("cut -d' ' -f19 /proc/1/stat /proc/self/stat", timeout=5)
        broker, own = map(int, result.output.split())
        expect(own > broker, f"the niceness of the broker is {broker}, of a command {own}")
        attempts = {"being as urgent as the broker": f"os.setpriority(os.PRIO_PROCESS, 0, {broker})"}
        await expect_denied(session, attempts)


@check("the channel to the host shows nowhere inside: no socket file, no name, no open descriptor")
async def channel_is_hidden(bench: Bench) -> None:
    attempts = {
        "opening the broker's input": "os.open('/proc/1/fd/0', os.O_RDWR)",
        "connecting to the broker's input": "socket.socket(socket.AF_UNIX).connect('/proc/1/fd/0')",
        "connecting to the own input": "socket.socket(socket.AF_UNIX).connect('/proc/self/fd/0')",
        **{
            f"guessing {name!r}": f"socket.socket(socket.AF_UNIX).connect({name!r})"
            for name in ("\0broker", "\0broker.sock", "\0prorl", "broker.sock", "/run/broker.sock", "/tmp/broker.sock")
        },
    }
    async with bench.sandbox() as session:
        result = await session.bash("find / -xdev -type s 2>/dev/null; find /tmp ~ /run /dev -type s 2>/dev/null", timeout=20)
        expect_equal(result.output, "", "the list of sockets in the file system")
        await expect_denied(session, attempts)


@check("commands and cells inherit no descriptor but the documented ones")
async def descriptors_are_few(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.write_file("open.py", f"{_OPEN}print(found)".encode())
        expect_output(await session.bash("cd; python3 -I open.py", timeout=10), "[0, 1, 2]\n")
        result = await session.python(f"{_OPEN}set(found) - {{0, 1, 2, {CELL_CHANNEL}, {CELL_SOURCE}}}", timeout=20)
        expect_equal((result.error, result.value), (None, "set()"), "what else an interpreter inherits")
        children = await session.python(
            "import subprocess; subprocess.check_output(['python3', '-I', 'open.py'], text=True)", timeout=20
        )
        expect_equal(children.value, "'[0, 1, 2]\\n'", "what a cell's child inherits")


@check("garbage written where an interpreter answers costs that interpreter, and nothing else")
async def survives_forged_answers(bench: Bench) -> None:
    forgeries = {
        "garbage": "b'\\xff' * 64",
        "an oversized frame": "struct.pack('!II', 0x7fffffff, 10)",
        "a broken header": "struct.pack('!II', 7, 3) + b'{{{'",
        "no object": "struct.pack('!II', 6, 2) + b'[]'",
        "an empty object": "struct.pack('!II', 6, 2) + b'{}'",
    }
    async with bench.sandbox() as session:
        await session.bash("x=kept", timeout=5)
        for what, data in forgeries.items():
            code = f"import os, struct, time\nos.write({CELL_CHANNEL}, {data})\ntime.sleep(60)"
            result = await session.python(code, timeout=2)
            expect(result.error is not None, f"{what} was taken for an answer: {result}")
            expect_equal((await session.python("1 + 1", timeout=20)).value, "2", f"the next cell's value after {what}")
        expect_output(await session.bash("echo $x", timeout=5), "kept\n")


@check("file verbs give nothing of the broker itself: not its log on the host, its memory, its settings")
async def files_are_not_served(bench: Bench) -> None:
    own = [
        f"/proc/{process}/{name}" for process in ("self", "1") for name in ("environ", "mem", "maps", "oom_score_adj", "comm")
    ]
    own += [f"/proc/self/fd/{number}" for number in range(32)]
    async with bench.sandbox() as session:
        for number, path in enumerate(own):
            link = f"/tmp/link{number}"
            await session.bash(f"ln -s {path} {link}", timeout=5)
            for name in (path, link):
                try:
                    data = await session.read_file(name)
                except SandboxFileError:
                    pass
                else:
                    expect(False, f"{name} gave {data[:80]!r}")
                try:
                    await session.write_file(name, b"999")
                except SandboxFileError:
                    continue
                expect(False, f"{name} could be written")
        expect(await session.ping() < 5, "the broker does not answer")


@check("two sandboxes see nothing of each other: files, shared memory, loopback")
async def siblings_share_nothing(bench: Bench) -> None:
    text = marker()
    serve = "import socket\ns = socket.create_server(('127.0.0.1', 45678))"
    name = bench.new_name()
    async with bench.sandbox(name=name) as one, bench.sandbox() as two:
        await one.bash(f"echo {text} | tee /tmp/{text} ~/{text} /dev/shm/{text}", timeout=5)
        expect((await one.python(serve, timeout=10)).error is None, "the first sandbox could not listen")
        result = await two.bash("ls -a /tmp ~ /dev/shm; cat /tmp/* ~/* /dev/shm/*; ipcs 2>/dev/null", timeout=5)
        expect(text not in result.output, "the second sandbox sees the first one's files")
        state = bench.backend.state_dir / name
        result = await two.bash(f"ls -a {state}; cat {state}/* 2>/dev/null", timeout=5)
        expect("sandbox.json" not in result.output, "the second sandbox sees the first one's state")
        await expect_denied(two, {"the first one's service answered": "socket.create_connection(('127.0.0.1', 45678), 3)"})


@check("two sandboxes see nothing of each other's processes, and cannot signal them")
async def siblings_are_invisible(bench: Bench) -> None:
    text = marker()
    async with bench.sandbox() as one, bench.sandbox() as two:
        pid = await start_marked(one, text)
        result = await two.bash("cat /proc/*/cmdline /proc/*/environ | tr '\\0' ' '", timeout=5)
        expect(text not in result.output, "the second sandbox sees the first one's process")
        await expect_denied(two, {"signalling it": f"os.kill({pid}, 9)", "holding it": f"os.pidfd_open({pid})"})
        await two.bash("kill -9 -1", timeout=5)
        expect_output(await one.bash(f"pgrep -c -f {text} || grep -lsa {text} /proc/[0-9]*/cmdline | wc -l", timeout=5), "1\n")
