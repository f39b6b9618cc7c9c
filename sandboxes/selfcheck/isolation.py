"""What of the host must be out of reach: its users, files, environment, processes and identity."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

from sandboxes.protocol import Bind, SandboxSpec
from sandboxes.selfcheck.attempts import expect_denied, host_file, host_pids, start_marked
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal, expect_output, marker


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
        expect_output(
            await session.bash(
                "[ $(id -u) != 0 ] && [ -O ~ ] && cd && [ $PWD = $HOME ] && [ $(id -un) = $(stat -c %U ~) ] && umask", timeout=5
            ),
            "0022\n",
        )
        result = await session.bash("grep -E '^(CapPrm|CapEff|CapAmb|NoNewPrivs)' /proc/self/status", timeout=5)
        values = dict(line.split(":\t") for line in result.output.splitlines())
        expect_equal(values.pop("NoNewPrivs"), "1", "NoNewPrivs")
        expect(all(int(value, 16) == 0 for value in values.values()), f"capabilities are {values}")
        await expect_denied(
            session, {"setuid(0)": "os.setuid(0)", "setgid(0)": "os.setgid(0)", "setgroups": "os.setgroups([0])"}
        )


@check("to the host, what runs inside belongs to an ordinary user without further groups, whoever runs the platform")
async def is_unprivileged_on_host(bench: Bench) -> None:
    async with bench.sandbox() as session:
        pid = await start_marked(session, marker())
        status = dict(line.partition(":\t")[::2] for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        expect("0" not in status["Uid"].split() + status["Gid"].split(), f"it runs as {status['Uid']}, {status['Gid']}")
        if os.geteuid() == 0:
            expect_equal(status["Groups"].split(), [], "the list of its groups")


@check("files of the host outside /usr cannot be read, though everybody on the host may")
async def hides_host_files(bench: Bench) -> None:
    shared = (tempfile.gettempdir(), "/var/tmp", "/run", "/dev/shm", "/srv", "/opt", "/mnt")  # noqa: S108
    async with bench.sandbox() as session:
        for directory in dict.fromkeys([Path.home(), *map(Path, shared)]):
            with contextlib.suppress(OSError), host_file(directory) as (path, secret):
                result = await session.bash(f"cat {path} /proc/1/root{path} /proc/*/root{path} /proc/*/cwd{path}", timeout=10)
                expect(secret not in result.output, f"{path} could be read")


@check("the host's accounts, keys and identity files are not shown")
async def hides_host_configuration(bench: Bench) -> None:
    names = ("passwd", "group", "shadow", "sudoers", "fstab", "machine-id", "hostname", "ssh/ssh_host_ed25519_key", "crontab")
    async with bench.sandbox() as session:
        for path in (Path("/etc", name) for name in names):
            with contextlib.suppress(OSError):
                if contents := path.read_text()[:4096]:
                    result = await session.bash(f"cat {path}", timeout=5)
                    expect(contents not in result.output, f"{path} is the host's")
        result = await session.bash("cat /etc/shadow /etc/ssh/*key* /etc/ssl/private/* /root/.??* 2>/dev/null", timeout=5)
        expect_equal(result.output, "", "what was read of the host's secrets")


@check("the platform's own files are out of reach: its state directories, and other users' homes")
async def hides_platform_files(bench: Bench) -> None:
    name = bench.new_name()
    async with bench.sandbox(name=name) as session:
        state = bench.backend.state_dir
        for path in (state, state / name, Path.home(), Path(sys.prefix)):
            if path.is_relative_to("/usr"):
                continue  # which is shown
            result = await session.bash(
                f"[ {path} -ef ~ ] || ls -A {path} /proc/1/root{path} /proc/1/cwd/{path} 2>/dev/null", timeout=5
            )
            lines = [line for line in result.output.splitlines() if line and not line.endswith(":")]
            expect_equal(lines, [], f"what was listed of {path}")


@check("environment variables of the host are not visible, those of the spec are")
async def hides_host_environment(bench: Bench) -> None:
    secret = marker()
    os.environ["PRORL_SELFCHECK_SECRET"] = secret
    try:
        async with bench.sandbox(SandboxSpec(env={"GREETING": "hello world"})) as session:
            result = await session.bash("env; cat /proc/*/environ /proc/*/task/*/environ | tr '\\0' '\\n'", timeout=5)
            expect(secret not in result.output, "the host's environment is visible")
            expect_output(await session.bash("echo $GREETING", timeout=5), "hello world\n")
            expect_equal(
                (await session.python("import os; os.environ['GREETING']", timeout=10)).value, "'hello world'", "GREETING"
            )
    finally:
        del os.environ["PRORL_SELFCHECK_SECRET"]


@check("no process of a sandbox carries the host's environment, not even where it cannot be read from inside")
async def starts_with_clean_environment(bench: Bench) -> None:
    secret = marker()
    os.environ["PRORL_SELFCHECK_SECRET"] = secret
    before = set(host_pids())
    try:
        async with bench.sandbox() as session:
            await session.bash("sleep 600 &", timeout=5)
            for pid in set(host_pids()) - before:
                with contextlib.suppress(OSError):
                    expect(secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes(), f"process {pid} carries it")
    finally:
        del os.environ["PRORL_SELFCHECK_SECRET"]


@check("values of the spec's environment show neither in the host's process list nor in a launcher's environment")
async def keeps_environment_off_argv(bench: Bench) -> None:
    secret = marker().encode()
    async with bench.sandbox(SandboxSpec(env={"TOKEN": secret.decode()})) as session:
        inside = Path(f"/proc/{await start_marked(session, marker())}/ns/pid").readlink()
        for pid in host_pids():
            process = Path("/proc", str(pid))
            with contextlib.suppress(OSError):
                expect(secret not in (process / "cmdline").read_bytes(), f"the arguments of process {pid} show it")
                if (process / "ns/pid").readlink() != inside:
                    expect(secret not in (process / "environ").read_bytes(), f"the environment of process {pid} shows it")


@check("processes of the host are not visible")
async def hides_host_processes(bench: Bench) -> None:
    text = marker()
    async with _host_process(text), bench.sandbox() as session:
        result = await session.bash("ls /proc | grep -c '^[0-9]'; cat /proc/[0-9]*/cmdline | tr '\\0' ' '", timeout=5)
        expect(int(result.output.split()[0]) < 10, f"there are {result.output.split()[0]} processes")
        expect(text not in result.output, "command lines of the host are visible")
        await expect_denied(session, {f"process {os.getpid()} could be signalled": f"os.kill({os.getpid()}, 0)"})


@check("the host's name, kernel command line and hardware are not shown")
async def hides_host_identity(bench: Bench) -> None:
    async with bench.sandbox() as session:
        result = await session.bash("uname -n; cat /proc/sys/kernel/hostname", timeout=5)
        expect(socket.gethostname() not in result.output.split(), f"the host's name is {result.output}")
        command_line = Path("/proc/cmdline").read_text().strip()
        result = await session.bash("cat /proc/cmdline", timeout=5)
        expect(not command_line or command_line not in result.output, "the kernel's command line is shown")
        result = await session.bash("find /sys -mindepth 1 2>/dev/null | head -n 3", timeout=10)
        expect_equal(result.output, "", "what is shown of /sys")


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
