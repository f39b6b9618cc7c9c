"""The filter program, executed by a small interpreter of classic BPF."""

from __future__ import annotations

import errno
import socket
import struct
from typing import NamedTuple

import pytest

from sandboxes.backends.seccomp import build_filter

ALLOW = 0x7FFF0000
X86_64 = 0xC000003E
AARCH64 = 0xC00000B7

NEW_USER_NAMESPACE = 0x10000000
THREAD = 0x003D0F00  # what a C library passes to clone for a thread


class Calls(NamedTuple):
    """System call numbers of one architecture."""

    read: int
    mount: int
    socket: int
    prlimit: int
    clone: int
    unshare: int
    setns: int
    ioctl: int
    setaffinity: int
    setscheduler: int
    setpriority: int
    ioprio_set: int


MACHINES = [
    ("x86_64", X86_64, Calls(0, 165, 41, 302, 56, 272, 308, 16, 203, 144, 141, 251)),
    ("aarch64", AARCH64, Calls(63, 40, 198, 261, 220, 97, 268, 29, 122, 119, 140, 30)),
]


def run_filter(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    data = struct.pack("=IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
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
        elif code == 0x45:
            position += if_true if accumulator & value else if_false
        else:
            assert code == 0x06
            return int(value)


def refusal(number: int) -> int:
    return 0x00050000 | number


@pytest.mark.parametrize(("machine", "architecture", "calls"), MACHINES)
class TestFilter:
    @pytest.fixture
    def program(self, machine: str) -> bytes:
        program = build_filter(machine)
        assert program is not None
        return program

    def test_refuses_kernel_interfaces(self, program: bytes, architecture: int, calls: Calls):
        assert run_filter(program, architecture, calls.read) == ALLOW
        assert run_filter(program, architecture, calls.mount) == refusal(errno.EPERM)
        assert run_filter(program, architecture, 425) == refusal(errno.EPERM)  # io_uring_setup

    def test_allows_the_usual_sockets_only(self, program: bytes, architecture: int, calls: Calls):
        for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK):
            assert run_filter(program, architecture, calls.socket, family) == ALLOW
        for family in (socket.AF_PACKET, socket.AF_VSOCK, socket.AF_ALG):
            assert run_filter(program, architecture, calls.socket, family) == refusal(errno.EAFNOSUPPORT)

    def test_lets_a_process_limit_itself_only(self, program: bytes, architecture: int, calls: Calls):
        assert run_filter(program, architecture, calls.prlimit, 0) == ALLOW
        assert run_filter(program, architecture, calls.prlimit, 1) == refusal(errno.EPERM)

    def test_refuses_new_namespaces(self, program: bytes, architecture: int, calls: Calls):
        assert run_filter(program, architecture, calls.clone, 17) == ALLOW  # fork
        assert run_filter(program, architecture, calls.clone, THREAD) == ALLOW
        assert run_filter(program, architecture, calls.clone, 17 | NEW_USER_NAMESPACE) == refusal(errno.EPERM)
        assert run_filter(program, architecture, 435, 0) == refusal(errno.ENOSYS)  # clone3: falls back to clone
        assert run_filter(program, architecture, calls.unshare, 0x400) == ALLOW  # descriptors
        for flag in (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, NEW_USER_NAMESPACE, 0x20000000, 0x40000000):
            assert run_filter(program, architecture, calls.unshare, flag) == refusal(errno.EPERM)
        assert run_filter(program, architecture, calls.setns, 3, 0) == refusal(errno.EPERM)

    def test_refuses_typing_into_terminals(self, program: bytes, architecture: int, calls: Calls):
        assert run_filter(program, architecture, calls.ioctl, 0, 0x5401) == ALLOW  # TCGETS
        for request in (0x5412, 0x541C, 0x5412 | 1 << 40):  # the kernel ignores the upper half
            assert run_filter(program, architecture, calls.ioctl, 0, request) == refusal(errno.EPERM)

    def test_leaves_the_broker_its_priority(self, program: bytes, architecture: int, calls: Calls):
        for call in (calls.setaffinity, calls.setscheduler):
            assert run_filter(program, architecture, call, 7) == ALLOW
            assert run_filter(program, architecture, call, 1) == refusal(errno.EPERM)
        for call, one_process in ((calls.setpriority, 0), (calls.ioprio_set, 1)):
            assert run_filter(program, architecture, call, one_process, 0) == ALLOW
            assert run_filter(program, architecture, call, one_process, 1) == refusal(errno.EPERM)
            assert run_filter(program, architecture, call, 2, 0) == refusal(errno.EPERM)  # all processes of a user

    def test_keeps_cpus_where_they_are_given(self, program: bytes, machine: str, architecture: int, calls: Calls):
        pinning = build_filter(machine, pins_cpus=True)
        assert pinning is not None
        assert run_filter(program, architecture, calls.setaffinity) == ALLOW
        assert run_filter(pinning, architecture, calls.setaffinity) == refusal(errno.EPERM)


def test_other_abis_are_refused() -> None:
    program = build_filter("x86_64")
    assert program is not None
    assert run_filter(program, 0x40000003, 3) == refusal(errno.EPERM)  # i386
    assert run_filter(program, X86_64, 0x40000000) == refusal(errno.EPERM)  # x32


def test_unknown_machines_have_no_filter() -> None:
    assert build_filter("riscv64") is None
