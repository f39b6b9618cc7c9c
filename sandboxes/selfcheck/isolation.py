"""What must be out of reach: the host, the network, other sandboxes, the broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from sandboxes.protocol import Bind, SandboxSpec, Session
from sandboxes.selfcheck.framework import Bench, CheckSkipped, check, expect, expect_equal, expect_output, marker


async def _expect_denied(session: Session, attempts: dict[str, str]) -> None:
    """Each attempt is Python code that raises OSError when denied."""
    for what, code in attempts.items():
        script = f"import ctypes, os, socket, sys\ntry:\n    {code}\nexcept OSError:\n    sys.exit(33)\n"
        await session.write_file("attempt.py", script.encode())
        result = await session.bash("cd; python3 attempt.py", timeout=10)
        expect(result.exit_code == 33, f"{what}: {result}")


@contextlib.contextmanager
def _host_file(directory: Path) -> Iterator[tuple[Path, str]]:
    """A file on the host that everybody may read, and its contents."""
    secret = marker()
    path = directory / f"prorl-selfcheck-{secrets.token_hex(6)}"
    path.write_text(secret)
    path.chmod(0o644)
    try:
        yield path, secret
    finally:
        path.unlink()


@contextlib.asynccontextmanager
async def _host_process(text: str) -> AsyncIterator[None]:
    """A process on the host with `text` among its arguments."""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", text, stdin=asyncio.subprocess.PIPE)
    try:
        yield
    finally:
        process.kill()
        await process.wait()


@check("the agent is an ordinary user with a home, without capabilities, and cannot gain any")
async def runs_unprivileged(bench: Bench) -> None:
    async with bench.sandbox() as session:
        # Its number is not 0; some backends cannot choose it.
        identity = await session.bash("[ $(id -u) != 0 ] && echo $HOME; cd; pwd; id -un", timeout=5)
        expect_output(identity, "/home/agent\n/home/agent\nagent\n")
        result = await session.bash("grep -E '^(CapPrm|CapEff|CapAmb|NoNewPrivs)' /proc/self/status", timeout=5)
        values = dict(line.split(":\t") for line in result.output.splitlines())
        expect_equal(values.pop("NoNewPrivs"), "1", "NoNewPrivs")
        expect(all(int(value, 16) == 0 for value in values.values()), f"capabilities are {values}")
        await _expect_denied(session, {"setuid(0) succeeded": "os.setuid(0)", "setgroups succeeded": "os.setgroups([0])"})


@check("files of the host outside /usr cannot be read: in /tmp, in the home directory, in /etc")
async def hides_host_files(bench: Bench) -> None:
    async with bench.sandbox() as session:
        for directory in (Path(tempfile.gettempdir()), Path.home()):
            try:
                with _host_file(directory) as (path, secret):
                    result = await session.bash(f"cat {path}; cat /proc/1/root{path}; cat /proc/1/cwd{path}", timeout=5)
                    expect(secret not in result.output, f"{path} could be read")
            except PermissionError:
                continue
        result = await session.bash("cat /etc/shadow /etc/ssh/* /etc/ssl/private/* /root/.bashrc 2>/dev/null", timeout=5)
        expect_equal(result.output, "", "what was read of the host's secrets")


@check("environment variables of the host are not visible, those of the spec are")
async def hides_host_environment(bench: Bench) -> None:
    secret = marker()
    os.environ["PRORL_SELFCHECK_SECRET"] = secret
    try:
        async with bench.sandbox(SandboxSpec(env={"GREETING": "hello world"})) as session:
            result = await session.bash("env; cat /proc/*/environ | tr '\\0' '\\n'", timeout=5)
            expect(secret not in result.output, "the host's environment is visible")
            expect_output(await session.bash("echo $GREETING", timeout=5), "hello world\n")
            expect_equal(
                (await session.python("import os; os.environ['GREETING']", timeout=10)).value, "'hello world'", "GREETING"
            )
    finally:
        del os.environ["PRORL_SELFCHECK_SECRET"]


@check("values of the spec's environment do not show in the host's process list")
async def keeps_environment_off_argv(bench: Bench) -> None:
    secret = marker()
    async with bench.sandbox(SandboxSpec(env={"TOKEN": secret})) as session:
        await session.bash("true", timeout=5)
        for directory in Path("/proc").iterdir():
            if directory.name.isdigit():
                with contextlib.suppress(OSError):
                    expect(secret.encode() not in (directory / "cmdline").read_bytes(), f"process {directory.name} shows it")


@check("processes of the host are not visible")
async def hides_host_processes(bench: Bench) -> None:
    text = marker()
    async with _host_process(text), bench.sandbox() as session:
        result = await session.bash("ls /proc | grep -c '^[0-9]'; cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=5)
        expect(int(result.output.split()[0]) < 10, f"there are {result.output.split()[0]} processes")
        expect(text not in result.output, "command lines of the host are visible")


@check("there is no network: loopback is the sandbox's own, names do not resolve, raw and vsock sockets are refused")
async def has_no_network(bench: Bench) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        async with bench.sandbox() as session:
            await _expect_denied(
                session,
                {
                    "a loopback service of the host answered": f"socket.create_connection(('127.0.0.1', {port}), 3)",
                    "an outside address answered": "socket.create_connection(('192.0.2.1', 80), 3)",
                    "a name resolved": "socket.getaddrinfo('example.com', 80)",
                    "a raw socket was made": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
                    "a packet socket was made": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)",
                    "a vsock socket was made": "socket.socket(40, socket.SOCK_STREAM, 0)",
                },
            )
            result = await session.bash("tail -n +3 /proc/net/dev | cut -d: -f1", timeout=5)
            expect_equal(result.output.split(), ["lo"], "the list of network interfaces")
            own = "import socket\ns = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname(), 3)"
            expect((await session.python(own, timeout=10)).error is None, "the sandbox's own loopback does not work")


@check("abstract Unix sockets of the host are out of reach")
async def has_no_abstract_sockets(bench: Bench) -> None:
    address = f"prorl-{marker()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        async with bench.sandbox() as session:
            attempt = f"socket.socket(socket.AF_UNIX).connect('\\0{address}')"
            await _expect_denied(session, {"the host's abstract socket answered": attempt})


@check("/usr, /etc and binds are read-only")
async def has_read_only_system(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        (Path(directory) / "data").write_text("shared")
        async with bench.sandbox(SandboxSpec(binds=(Bind(directory, "/opt/data"),))) as session:
            expect_output(await session.bash("cat /opt/data/data", timeout=5), "shared")
            result = await session.bash(
                "{ for d in /usr /usr/bin /etc /opt/data /bin /lib; do touch $d/x && echo $d; done; "
                "echo x >> /etc/passwd && echo passwd; rm -f /etc/hosts && echo hosts; "
                "rm -f /opt/data/data && echo data; } 2>/dev/null",
                timeout=5,
            )
            expect_equal(result.output, "", "the list of things that could be changed")
        expect_equal((Path(directory) / "data").read_text(), "shared", "the host's file")


@check("mounts, namespaces, device nodes and kernel interfaces are refused")
async def denies_kernel_interfaces(bench: Bench) -> None:
    libc = "ctypes.CDLL(None, use_errno=True)"

    def call(expression: str) -> str:
        return f"sys.exit(0) if {libc}.{expression} >= 0 else (_ for _ in ()).throw(OSError(ctypes.get_errno(), ''))"

    async with bench.sandbox() as session:
        await _expect_denied(
            session,
            {
                "mount succeeded": call("mount(b'none', b'/tmp', b'tmpfs', 0, None)"),
                "umount succeeded": call("umount2(b'/usr', 2)"),
                "a user namespace was made": call("unshare(0x10000000)"),
                "a mount namespace was made": call("unshare(0x00020000)"),
                "a device node was made": "os.mknod('/tmp/sda', 0o60666, os.makedev(8, 0))",
                "chroot succeeded": "os.chroot('/tmp')",
                "the host name was set": "socket.sethostname('x')",
                "a kernel setting was written": "open('/proc/sys/kernel/core_pattern', 'w').write('x')",
                "sysrq was written": "open('/proc/sysrq-trigger', 'w').write('h')",
                "kernel memory was opened": "open('/dev/mem', 'rb')",
            },
        )


@check("keyrings, io_uring, bpf and perf are refused")
async def denies_risky_calls(bench: Bench) -> None:
    facts = await bench.backend.probe()
    if facts.get("system_calls") == "none":
        raise CheckSkipped("system calls are not filtered on this machine")
    if os.uname().machine != "x86_64":
        raise CheckSkipped("the attempts use the system call numbers of x86_64")
    numbers = {
        "keyctl": "250, 0, -3, 0",
        "io_uring_setup": "425, 1, 0",
        "bpf": "321, 0, 0, 0",
        "perf_event_open": "298, 0, 0, 0, 0, 0",
    }
    async with bench.sandbox() as session:
        for name, arguments in numbers.items():
            code = f"import ctypes\nl = ctypes.CDLL(None, use_errno=True)\nl.syscall({arguments}), ctypes.get_errno()"
            expect_equal((await session.python(code, timeout=10)).value, "(-1, 1)", f"the result of {name}")


@check("the broker cannot be killed, traced, starved or looked into from inside")
async def protects_broker(bench: Bench) -> None:
    attempts = {
        "its memory could be opened": "open('/proc/1/mem', 'rb')",
        "its environment could be read": "open('/proc/1/environ', 'rb').read()",
        "its descriptors could be listed": "os.listdir('/proc/1/fd')",
        "it could be traced": "sys.exit(0) if ctypes.CDLL(None).ptrace(16, 1, 0, 0) == 0 else os.setuid(0)",
        "its listening socket could be taken": (
            "sys.exit(0) if ctypes.CDLL(None).syscall(438, os.pidfd_open(1), 0, 0) >= 0 else os.setuid(0)"
        ),
        "its limits could be lowered": "__import__('resource').prlimit(1, 7, (0, 0))",
    }
    async with bench.sandbox() as session:
        await session.bash("for s in $(seq 1 64); do [ $s = 17 ] || kill -$s 1; done 2>/dev/null", timeout=5)
        await _expect_denied(session, attempts)
        await session.bash("kill -9 -1; kill -STOP 1", timeout=5)
        expect_output(await session.bash("echo back", timeout=5), "back\n")
        expect(await session.ping() < 5, "the broker does not answer")


@check("the channel to the host shows nowhere inside")
async def hides_channel(bench: Bench) -> None:
    async with bench.sandbox() as session:
        result = await session.bash(
            "find / -xdev -type s 2>/dev/null; find /tmp /home /run /dev -type s 2>/dev/null", timeout=20
        )
        expect_equal(result.output, "", "the list of sockets in the file system")
        result = await session.bash("find /proc/self/fd/ -type l -printf '%l\\n' | grep -E '^(socket|pipe)'", timeout=5)
        expect(result.output.count("\n") <= 2, f"a command inherits more than its output: {result.output}")


@check("two sandboxes see nothing of each other: files, processes, shared memory, loopback")
async def separates_sandboxes(bench: Bench) -> None:
    text = marker()
    serve = "import socket\ns = socket.create_server(('127.0.0.1', 45678))"
    async with bench.sandbox() as one, bench.sandbox() as two:
        await one.bash(
            f"echo {text} | tee /tmp/{text} ~/{text} /dev/shm/{text}; bash -c 'exec -a {text} sleep 60' &", timeout=5
        )
        expect((await one.python(serve, timeout=10)).error is None, "the first sandbox could not listen")
        result = await two.bash("ls -a /tmp ~ /dev/shm; cat /proc/*/cmdline; cat /tmp/* ~/* /dev/shm/*", timeout=5)
        expect(text not in result.output, "the second sandbox sees the first one's marks")
        await _expect_denied(two, {"the first one's service answered": "socket.create_connection(('127.0.0.1', 45678), 3)"})
