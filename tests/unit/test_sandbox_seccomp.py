"""The filter program, executed by a small interpreter of classic BPF."""

from __future__ import annotations

import errno
import socket
import struct

import pytest

from sandboxes.backends.seccomp import build_filter

ALLOW = 0x7FFF0000
X86_64 = 0xC000003E
AARCH64 = 0xC00000B7


def run_filter(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    data = struct.pack("=IIQ6Q", number, architecture, 0, argument, 0, 0, 0, 0, 0)
    position = accumulator = 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("=HBBI", program, position * 8)
        position += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif code == 0x15:
            position += if_true if accumulator == value else if_false
        elif code == 0x35:
            position += if_true if accumulator >= value else if_false
        else:
            assert code == 0x06
            return int(value)


def refusal(number: int) -> int:
    return 0x00050000 | number


@pytest.mark.parametrize(
    ("machine", "architecture", "read", "mount", "socket_call", "prlimit"),
    [("x86_64", X86_64, 0, 165, 41, 302), ("aarch64", AARCH64, 63, 40, 198, 261)],
)
def test_filter(machine: str, architecture: int, read: int, mount: int, socket_call: int, prlimit: int) -> None:
    program = build_filter(machine)
    assert program is not None
    assert run_filter(program, architecture, read) == ALLOW
    assert run_filter(program, architecture, mount) == refusal(errno.EPERM)
    assert run_filter(program, architecture, 425) == refusal(errno.EPERM)  # io_uring_setup
    for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
        assert run_filter(program, architecture, socket_call, family) == ALLOW
    for family in (socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG):
        assert run_filter(program, architecture, socket_call, family) == refusal(errno.EAFNOSUPPORT)
    assert run_filter(program, architecture, prlimit, 0) == ALLOW
    assert run_filter(program, architecture, prlimit, 1) == refusal(errno.EPERM)


def test_other_abis_are_refused() -> None:
    program = build_filter("x86_64")
    assert program is not None
    assert run_filter(program, 0x40000003, 3) == refusal(errno.EPERM)  # i386
    assert run_filter(program, X86_64, 0x40000000) == refusal(errno.EPERM)  # x32


def test_unknown_machines_have_no_filter() -> None:
    assert build_filter("riscv64") is None
