"""Kernel interfaces that must be refused: mounts, namespaces, tracing, devices, keyrings, raised privileges."""

from __future__ import annotations

# Paths in /tmp are the sandbox's.
import ctypes
import os
import pty
import shutil
import tempfile
from pathlib import Path

from sandboxes.protocol import HOST, Bind, SandboxSpec
from sandboxes.selfcheck.attempts import expect_denied, start_marked
from sandboxes.selfcheck.framework import Bench, CheckSkipped, check, expect, expect_equal, marker, value_of
from sandboxes.selfcheck.samples import directory_root

_NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "pid": 0x20000000,
    "network": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
    "time": 0x00000080,
}
# Settings under /proc/sys that belong to the sandbox's own namespaces.
_OWN_SETTINGS = (
    "fs/mqueue/",
    "net/",
    "user/",
    "kernel/msg",
    "kernel/sem",
    "kernel/shm",
    "kernel/auto_msgmni",
    "kernel/pid_max",
    "kernel/ns_last_pid",
)
_HARMLESS_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)}  # null to urandom, tty, console, ptmx

_LIST_DEVICES = """
import os, stat
statuses = [os.lstat(os.path.join(place, name)) for place, _, names in os.walk("/dev") for name in names]
[(os.major(s.st_rdev), os.minor(s.st_rdev)) for s in statuses if stat.S_ISCHR(s.st_mode) or stat.S_ISBLK(s.st_mode)]
"""
_LIST_WRITABLE_SETTINGS = """
import os
writable = []
for place, _, names in os.walk("/proc/sys"):
    for path in (os.path.join(place, name) for name in names):
        try:
            os.close(os.open(path, os.O_WRONLY))
            writable.append(os.path.relpath(path, "/proc/sys"))
        except OSError:
            pass
writable
"""

# Attempts, as `attempts.expect_denied` takes them.
_MOUNTS = {
    "mounting a tmpfs": "call(libc.mount(b'none', b'/tmp/m', b'tmpfs', 0, None))",
    "mounting proc": "call(libc.mount(b'proc', b'/tmp/m', b'proc', 0, None))",
    "mounting an overlay": (
        "call(libc.mount(b'overlay', b'/tmp/m', b'overlay', 0, b'lowerdir=/usr,upperdir=/tmp/u,workdir=/tmp/w'))"
    ),
    "binding a file": "call(libc.mount(b'/usr', b'/tmp/m', None, 4096, None))",
    "making /usr writable": "call(libc.mount(None, b'/usr', None, 4096 | 32, None))",
    "unmounting /usr": "call(libc.umount2(b'/usr', 2))",
    "unmounting /proc": "call(libc.umount2(b'/proc', 2))",
    "pivot_root": "syscall('pivot_root', b'/tmp/m', b'/tmp/m')",
    "fsopen": "syscall('fsopen', b'tmpfs', 0)",
    "open_tree with a copy": "syscall('open_tree', -100, b'/usr', 1)",
    "move_mount": "syscall('move_mount', -100, b'/usr', -100, b'/tmp/m', 0)",
    "mount_setattr": "syscall('mount_setattr', -100, b'/usr', 0, struct.pack('QQQQ', 0, 1, 0, 0), 32)",
    "chroot": "os.chroot('/tmp')",
    "setting the host name": "socket.sethostname('x')",
}
_DEVICES = {
    "making a block device": "os.mknod('/tmp/sda', 0o60666, os.makedev(8, 0))",
    "making a character device": "os.mknod('/tmp/null', 0o20666, os.makedev(1, 3))",
}


def _namespaces() -> dict[str, str]:
    attempts = {f"a new {name} namespace": f"call(libc.unshare({flag}))" for name, flag in _NAMESPACES.items()}
    child = "if {} == 0:\n    os._exit(0)"
    return attempts | {
        "a child in a new user namespace": child.format("syscall('clone', 0x10000000 | 17, 0, 0, 0, 0)"),
        "a child by clone3 in a new user namespace": child.format(
            "syscall('clone3', struct.pack('11Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0, 0, 0, 0), 88)"
        ),
        "unshare -Ur": "if subprocess.run(['unshare', '-Ur', 'true'], capture_output=True).returncode: raise OSError",
        "an overlay in a new user namespace": (
            "call(libc.unshare(0x10020000))\n"
            "call(libc.mount(b'overlay', b'/tmp', b'overlay', 0, b'lowerdir=/usr,upperdir=/tmp,workdir=/tmp'))"
        ),
        "entering its own user namespace again": "call(libc.setns(os.open('/proc/self/ns/user', os.O_RDONLY), 0))",
        "entering the broker's mount namespace": "call(libc.setns(os.open('/proc/1/ns/mnt', os.O_RDONLY), 0))",
        "entering the broker's namespaces by descriptor": "call(libc.setns(os.pidfd_open(1), 0x20000))",
    }


def _proc() -> dict[str, str]:
    readable = (
        "kcore",
        "kmsg",
        "kpagecount",
        "kpageflags",
        "kpagecgroup",
        "timer_list",
        "vmallocinfo",
        "slabinfo",
        "sched_debug",
    )
    attempts = {f"reading {name}": f"open('/proc/{name}', 'rb').read(1) or call(-1)" for name in readable}
    return attempts | {
        "asking the kernel by sysrq": "open('/proc/sysrq-trigger', 'r+b', 0).write(b'h')",
        "setting where core dumps go": "open('/proc/sys/kernel/core_pattern', 'r+b', 0).write(b'x')",
        "writing to the kernel's log": "open('/dev/kmsg', 'r+b', 0).write(b'x')",
        "staying when the kernel runs out of memory": "open('/proc/self/oom_score_adj', 'r+b', 0).write(b'-1000')",
        "changing the clock": "import time; time.clock_settime(time.CLOCK_REALTIME, time.time())",
    }


async def _require_filter(bench: Bench) -> None:
    if (await bench.backend.probe()).get("system_calls") == "none":
        raise CheckSkipped("system calls are not filtered on this machine: its processor is unknown to the filter")


@check("nothing can be mounted, unmounted or remounted, by old calls or new ones")
async def refuses_mounts(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await session.bash("mkdir /tmp/m /tmp/u /tmp/w", timeout=5)
        await expect_denied(session, _MOUNTS)


@check("no namespace can be made or entered, so that none lends capabilities")
async def refuses_namespaces(bench: Bench) -> None:
    async with bench.sandbox() as session:
        await expect_denied(session, _namespaces())


@check("keys of the host's user cannot be seen, read or added to")
async def refuses_keyrings(bench: Bench) -> None:
    await _require_filter(bench)
    name, secret = marker().encode(), marker().encode()
    libc = ctypes.CDLL(None, use_errno=True)
    add_key, keyctl = {"x86_64": (248, 250)}.get(os.uname().machine, (217, 219))
    user_keyring, revoke = -4, 3
    key = libc.syscall(add_key, b"user", name, secret, len(secret), user_keyring)  # negative where the host has no keyrings
    try:
        async with bench.sandbox() as session:
            result = await session.bash("cat /proc/keys /proc/key-users", timeout=5)
            expect(name.decode() not in result.output, "/proc/keys shows a key of the host's user")
            await expect_denied(
                session,
                {
                    "searching the user's keyring": f"syscall('keyctl', 10, -4, b'user', {name!r}, 0)",
                    "reading a key by its number": f"syscall('keyctl', 11, {key}, ctypes.create_string_buffer(99), 99)",
                    "request_key": f"syscall('request_key', b'user', {name!r}, None, -3)",
                    "add_key": "syscall('add_key', b'user', b'planted', b'x', 1, -4)",
                    "joining the session keyring": "syscall('keyctl', 1, None)",
                    "the user's keyring": "syscall('keyctl', 0, -4, 0)",
                },
            )
    finally:
        if key > 0:
            libc.syscall(keyctl, revoke, key)


@check("io_uring, bpf, perf, userfaultfd and file handles are refused")
async def refuses_risky_calls(bench: Bench) -> None:
    await _require_filter(bench)
    async with bench.sandbox() as session:
        await expect_denied(
            session,
            {
                "io_uring_setup": "syscall('io_uring_setup', 1, ctypes.create_string_buffer(120))",
                "bpf": "syscall('bpf', 0, ctypes.create_string_buffer(72), 72)",
                "perf_event_open": "syscall('perf_event_open', struct.pack('IIQ', 1, 112, 0) + bytes(96), 0, -1, -1, 0)",
                "userfaultfd": "syscall('userfaultfd', 1)",
                "open_by_handle_at": "syscall('open_by_handle_at', 3, struct.pack('Ii', 8, 1) + bytes(8), 0)",
            },
        )


@check("programs with the setuid bit give nobody more rights")
async def ignores_setuid(bench: Bench) -> None:
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        program = Path(directory) / "id"
        shutil.copy(shutil.which("id") or "/usr/bin/id", program)
        program.chmod(0o6755)  # root's, when root runs the platform
        async with bench.sandbox(SandboxSpec(binds=(Bind(directory, "/opt/setuid"),))) as session:
            result = await session.bash("id -u; /opt/setuid/id -u; id -g; /opt/setuid/id -g", timeout=5)
            user, as_program, group, as_program_group = result.output.split()
            expect_equal((as_program, as_program_group), (user, group), "the user and group of a setuid program")
            result = await session.bash("grep -h NoNewPrivs: /proc/[0-9]*/status | sort -u", timeout=5)
            expect_equal(result.output, "NoNewPrivs:\t1\n", "whether the kernel ignores the bit, for all processes")
            await expect_denied(
                session,
                {
                    "su": "if subprocess.run(['su', '-c', 'true'], stdin=-3, capture_output=True).returncode: raise OSError",
                    "newgrp": (
                        "if b'gid=0' not in subprocess.run(['newgrp', 'root'], input=b'id', capture_output=True).stdout:\n"
                        "    raise OSError"
                    ),
                },
            )


@check("there are no devices but the harmless ones, none can be made, and those of binds do not open")
async def has_no_devices(bench: Bench) -> None:
    async with bench.sandbox(SandboxSpec(binds=(Bind("/dev", "/opt/dev"),))) as session:
        devices = set(await value_of(session, _LIST_DEVICES))
        terminals = {(major, minor) for major, minor in devices if major == 136}
        expect_equal(devices - terminals - _HARMLESS_DEVICES, set(), "the set of other devices")
        attempts = {
            f"/dev/{name}": f"open('/dev/{name}', 'rb')"
            for name in ("mem", "kmsg", "kvm", "fuse", "port", "sda", "vda", "net/tun", "console")
        }
        attempts |= {
            f"a bound {name}": f"open('/opt/dev/{name}', 'rb')" for name in ("zero", "null", "kvm", "fuse", "vda", "tty")
        }
        await expect_denied(session, attempts | _DEVICES)


@check("/proc gives nothing of the host's memory, log or settings, and changes none of them")
async def protects_proc(bench: Bench) -> None:
    async with bench.sandbox() as session:
        settings = await value_of(session, _LIST_WRITABLE_SETTINGS)
        others = [setting for setting in settings if not setting.startswith(_OWN_SETTINGS)]
        expect_equal(others, [], "the list of kernel settings that can be written")
        result = await session.bash("grep -v '^0* ' /proc/kallsyms | head -n 1", timeout=10)
        expect_equal(result.output, "", "an address of the kernel")
        await expect_denied(session, _proc())


@check("no terminal of the host is there, and nothing can be typed into one")
async def has_no_host_terminal(bench: Bench) -> None:
    ours, theirs = pty.openpty()
    try:
        async with bench.sandbox() as session:
            result = await session.bash("ls /dev/pts", timeout=5)
            own = {line for line in result.output.split() if line != "ptmx"}
            name = Path(os.ttyname(theirs)).name
            attempts = {"typing into the own terminal": "fcntl.ioctl(os.open('/dev/tty', os.O_RDWR), termios.TIOCSTI, b'x')"}
            if name not in own:
                attempts["opening a terminal of the host"] = f"open('/dev/pts/{name}', 'rb')"
            await expect_denied(session, attempts)
            expect(len(own) <= 2, f"there are terminals {sorted(own)}")
    finally:
        os.close(ours)
        os.close(theirs)


@check("processes that a sandbox does not see cannot be traced, read, or robbed of descriptors by number")
async def refuses_tracing_by_number(bench: Bench) -> None:
    async with bench.sandbox() as victim, bench.sandbox() as session:
        pid = await start_marked(victim, marker())
        await expect_denied(session, tracing(pid))
        await expect_denied(session, tracing(os.getpid()))


def tracing(pid: int) -> dict[str, str]:
    """Attempts to get at another process."""
    vector = "ctypes.create_string_buffer(struct.pack('QQ', ctypes.addressof(buffer), 8))"
    read = f"buffer = ctypes.create_string_buffer(8); v = {vector}; call(libc.process_vm_readv({pid}, v, 1, v, 1, 0))"
    return {
        f"attaching to process {pid}": f"call(libc.ptrace(16, {pid}, 0, 0))",
        f"seizing process {pid}": f"call(libc.ptrace(0x4206, {pid}, 0, 0))",
        f"reading the memory of process {pid}": read,
        f"opening the memory of process {pid}": f"open('/proc/{pid}/mem', 'rb')",
        f"reading the environment of process {pid}": f"open('/proc/{pid}/environ', 'rb').read()",
        f"seeing what process {pid} has open": f"[os.readlink('/proc/{pid}/fd/' + fd) for fd in os.listdir('/proc/{pid}/fd')]",
        f"opening what process {pid} has open": f"os.open('/proc/{pid}/fd/1', os.O_RDONLY)",
        f"taking a descriptor of process {pid}": f"syscall('pidfd_getfd', os.pidfd_open({pid}), 0, 0)",
        f"comparing process {pid} with itself": f"syscall('kcmp', {pid}, os.getpid(), 1, 0, 0)",
        f"changing the limits of process {pid}": f"resource.prlimit({pid}, resource.RLIMIT_NOFILE, (0, 0))",
        f"slowing process {pid} down": f"os.setpriority(os.PRIO_PROCESS, {pid}, 19)",
        f"rescheduling process {pid}": f"os.sched_setscheduler({pid}, os.SCHED_IDLE, os.sched_param(0))",
    }


@check("who is root inside has no more power over the broker, the kernel and the host than anybody else")
async def keeps_fake_root_powerless(bench: Bench) -> None:
    spec = SandboxSpec(fakeroot=True)
    # Not among them: to have the broker ended first when the machine is out of memory, which costs nobody else anything.
    attempts = _MOUNTS | _namespaces() | _DEVICES | _proc() | tracing(1)
    for root in (HOST, directory_root()):
        async with bench.sandbox(spec, root=root) as session:
            await session.bash("mkdir /tmp/m /tmp/u /tmp/w; kill -9 1; kill -STOP 1", timeout=5)
            await expect_denied(session, attempts)
            expect(await session.ping() < 5, "the broker does not answer")
