"""What a sandbox without a network must not reach: the host's services, other sandboxes', the kernel's."""

from __future__ import annotations

import contextlib
import socket
import tempfile
from pathlib import Path

from sandboxes.selfcheck.attempts import expect_denied
from sandboxes.selfcheck.framework import Bench, check, expect, expect_equal, marker

_FAMILIES = {
    "packet": 17,
    "vsock": 40,
    "kernel crypto": 38,
    "key management": 15,
    "XDP": 44,
    "TIPC": 30,
    "Bluetooth": 31,
    "CAN": 29,
    "RDS": 21,
    "PPP": 24,
    "NFC": 39,
    "QIPC": 42,
    "SMC": 43,
}


def _own_addresses() -> list[str]:
    """Loopback, and the address that the host uses for others, if it has one."""
    addresses = ["127.0.0.1", "127.0.0.53"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing
        addresses.append(probe.getsockname()[0])
    return addresses


@check("TCP services of the host are out of reach, at its loopback and at its own address")
async def reach_no_service(bench: Bench) -> None:
    with socket.create_server(("0.0.0.0", 0)) as listener:  # noqa: S104 - for the time of this check, and answers nothing
        port = listener.getsockname()[1]
        async with bench.sandbox() as session:
            attempts = {
                f"{address} answered": f"socket.create_connection(({address!r}, {port}), 3)" for address in _own_addresses()
            }
            attempts |= {
                "::1 answered": f"socket.create_connection(('::1', {port}), 3)",
                "an outside address answered": "socket.create_connection(('192.0.2.1', 80), 3)",
                "a name resolved": "socket.getaddrinfo('example.com', 80)",
            }
            await expect_denied(session, attempts)
            result = await session.bash("tail -n +3 /proc/net/dev | cut -d: -f1", timeout=5)
            expect_equal(result.output.split(), ["lo"], "the list of network interfaces")
            own = "import socket\ns = socket.create_server(('127.0.0.1', 0)); socket.create_connection(s.getsockname(), 3)"
            expect((await session.python(own, timeout=10)).error is None, "the sandbox's own loopback does not work")


@check("Unix sockets of the host are out of reach, in directories that everybody may enter")
async def reach_no_unix_socket(bench: Bench) -> None:
    with contextlib.ExitStack() as stack:
        paths = []
        for place in (tempfile.gettempdir(), "/run", "/var/tmp", "/dev/shm", str(Path.home())):  # noqa: S108
            path = Path(place) / f"prorl-{marker()}.sock"
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            with contextlib.suppress(OSError):
                listener.bind(str(path))
                stack.callback(path.unlink)
                path.chmod(0o777)
                listener.listen()
                paths.append(path)
        expect(bool(paths), "no Unix socket could be made on the host")
        async with bench.sandbox() as session:
            reach = {f"{form}{path}" for path in paths for form in ("", "/proc/1/root", "/proc/self/root")}
            attempts = {f"{path} answered": f"socket.socket(socket.AF_UNIX).connect({path!r})" for path in sorted(reach)}
            await expect_denied(session, attempts)


@check("abstract Unix sockets of the host cannot be reached, nor seen")
async def reach_no_abstract_socket(bench: Bench) -> None:
    address = f"prorl-{marker()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{address}")
        listener.listen()
        async with bench.sandbox() as session:
            await expect_denied(session, {"it answered": f"socket.socket(socket.AF_UNIX).connect('\\0{address}')"})
            result = await session.bash("awk 'NR > 1 && NF > 7' /proc/net/unix", timeout=5)
            expect_equal(result.output, "", "the list of named sockets in /proc/net/unix")


@check("raw, packet, vsock and other unusual sockets are refused")
async def refuse_unusual_families(bench: Bench) -> None:
    attempts = {f"a {name} socket": f"socket.socket({number}, socket.SOCK_RAW, 0)" for name, number in _FAMILIES.items()}
    attempts |= {
        "a raw socket": "socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)",
        "a raw socket for whole packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 255)",
        "a raw IPv6 socket": "socket.socket(socket.AF_INET6, socket.SOCK_RAW, 58)",
        "a vsock connection to the hypervisor": "socket.socket(40, socket.SOCK_STREAM, 0).connect((2, 1))",
    }
    async with bench.sandbox() as session:
        await expect_denied(session, attempts)


@check("the network cannot be configured: interfaces, routes, firewall, audit")
async def refuse_configuration(bench: Bench) -> None:
    # A netlink request with the flags "request, acknowledge, create"; the answer is an error number, which `call` looks at.
    ask = (
        "s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, {protocol}); s.settimeout(3)\n"
        "body = {body}\ns.send(struct.pack('IHHII', 16 + len(body), {kind}, 0x405, 1, 0) + body)\n"
        "answer = s.recv(4096); ctypes.set_errno(1); call(struct.unpack_from('i', answer, 16)[0])"
    )
    name = "struct.pack('HH', 10, 3) + b'dummy\\0' + bytes(2)"
    link = f"bytes(16) + {name} + struct.pack('HHHH', 16, 18, 10, 1) + b'dummy\\0' + bytes(2)"
    async with bench.sandbox() as session:
        await expect_denied(
            session,
            {
                "adding an interface": ask.format(protocol=0, kind=16, body=link),
                "adding a route": ask.format(protocol=0, kind=24, body="struct.pack('BBBBBBBBI', 2, 0, 0, 0, 254, 3, 0, 1, 0)"),
                "adding a firewall table": ask.format(
                    protocol=12, kind=0xA00, body="bytes(4) + struct.pack('HH', 6, 1) + b'x\\0\\0\\0'"
                ),
                "writing to the audit log": ask.format(protocol=9, kind=1005, body="b'forged'"),
                "raising an interface": (
                    "fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x8914, struct.pack('16sH14x', b'lo', 0x41))"
                ),
                "a bridge": "fcntl.ioctl(socket.socket(socket.AF_INET, socket.SOCK_DGRAM), 0x89a0, b'br0' + bytes(13))",
            },
        )
