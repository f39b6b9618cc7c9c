"""A system call filter for sandboxes: what namespaces alone do not keep away from the host. No Django.

Classic BPF, assembled here because there is no library for it in the standard library. The broker installs it before it serves
(`sandboxes.broker.confine`), whatever started the sandbox. It is a deny list; it closes
* sockets of families that network namespaces do not cover (vsock reaches the hypervisor from any namespace),
* io_uring, which opens sockets behind the filter's back, and kernel interfaces with a long history of privilege escalation,
* new namespaces and mounts, the way to most of those interfaces,
* keyrings, which are shared with the user's other sessions, and the kernel's log, which is the host's,
* typing into a terminal by ioctl, which somebody else may read,
* `prlimit` on another process, and the priority of the broker, with which a command could starve it,
* memory that no process seems to have (`memfd_secret`), and other CPUs than the sandbox was given.
"""

from __future__ import annotations

import errno
import platform
import socket
import struct

_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
# Offsets in struct seccomp_data. Of arguments the low halves, first on little endian: the kernel reads no more of these.
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24

_X32_BIT = 0x40000000
_AUDIT_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_FAMILIES = (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK)
_NEW_NAMESPACES = 0x7E020000  # mount, cgroup, UTS, IPC, user, pid, network
_NEW_TIME_NAMESPACE = 0x80  # for unshare only: clone has the signal number there
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

# name: (x86_64, aarch64)
_CLONE = (56, 220)
_CLONE3 = (435, 435)
_IOCTL = (16, 29)
_PRLIMIT = (302, 261)
_SCHED_SETAFFINITY = (203, 122)
_SOCKET = (41, 198)
_UNSHARE = (272, 97)
# Their first argument is a process.
_SCHEDULING = {
    "sched_setaffinity": _SCHED_SETAFFINITY,
    "sched_setattr": (314, 274),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
}
# Their second argument is a process if the first one has this value, else several.
_PRIORITIES = {"ioprio_set": ((251, 30), 1), "setpriority": ((141, 140), 0)}
_BROKER = 1  # its process number inside
_DENIED = {
    "acct": (163, 89),
    "add_key": (248, 217),
    "bpf": (321, 280),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fsopen": (430, 430),
    "fspick": (433, 433),
    "init_module": (175, 105),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "io_uring_setup": (425, 425),
    "kexec_file_load": (320, 294),
    "kexec_load": (246, 104),
    "keyctl": (250, 219),
    "memfd_secret": (447, 447),
    "mount": (165, 40),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_by_handle_at": (304, 265),
    "open_tree": (428, 428),
    "open_tree_attr": (467, 467),
    "perf_event_open": (298, 241),
    "pivot_root": (155, 41),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "reboot": (169, 142),
    "request_key": (249, 218),
    "setns": (308, 268),
    "swapoff": (168, 225),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "umount2": (166, 39),
    "userfaultfd": (323, 282),
}


def build_filter(machine: str | None = None, *, pins_cpus: bool = False) -> bytes | None:
    """The program for `prctl(PR_SET_SECCOMP)`, or None for a machine whose system call numbers are not known here.

    With `pins_cpus` processes keep the CPUs they were given.
    """
    machine = machine or platform.machine()
    if machine not in _AUDIT_ARCHITECTURES:
        return None
    column = 0 if machine == "x86_64" else 1
    program = [
        _load(_ARCHITECTURE),
        # Another ABI of the same processor numbers its calls differently.
        *_unless_equal(_AUDIT_ARCHITECTURES[machine], then=[_fail(errno.EPERM)]),
        _load(_NUMBER),
    ]
    if machine == "x86_64":
        program += [_instruction(_JUMP_AT_LEAST, _X32_BIT, 0, 1), _fail(errno.EPERM)]
    typing = [part for request in (_TIOCSTI, _TIOCLINUX) for part in _if_equal(request, then=[_fail(errno.EPERM)])]
    program += _if_equal(_IOCTL[column], then=[_load(_ARGUMENT_1), *typing, _ALLOWED])
    program += _if_equal(_CLONE[column], then=[_load(_ARGUMENT_0), *_if_any_bit(_NEW_NAMESPACES, _fail(errno.EPERM)), _ALLOWED])
    # Its flags are in memory, where a filter cannot look: libraries take this error as a sign to use clone.
    program += _if_equal(_CLONE3[column], then=[_fail(errno.ENOSYS)])
    unshared = _if_any_bit(_NEW_NAMESPACES | _NEW_TIME_NAMESPACE, _fail(errno.EPERM))
    program += _if_equal(_UNSHARE[column], then=[_load(_ARGUMENT_0), *unshared, _ALLOWED])
    for numbers in _DENIED.values():
        program += _if_equal(numbers[column], then=[_fail(errno.EPERM)])
    if pins_cpus:
        program += _if_equal(_SCHED_SETAFFINITY[column], then=[_fail(errno.EPERM)])
    for numbers in _SCHEDULING.values():
        of_broker = _if_equal(_BROKER, then=[_fail(errno.EPERM)])
        program += _if_equal(numbers[column], then=[_load(_ARGUMENT_0), *of_broker, _ALLOWED])
    for numbers, one_process in _PRIORITIES.values():
        of_others = _unless_equal(one_process, then=[_fail(errno.EPERM)])
        of_broker = [_load(_ARGUMENT_1), *_if_equal(_BROKER, then=[_fail(errno.EPERM)])]
        program += _if_equal(numbers[column], then=[_load(_ARGUMENT_0), *of_others, *of_broker, _ALLOWED])
    allowed = [part for family in _FAMILIES for part in _if_equal(family, then=[_ALLOWED])]
    program += _if_equal(_SOCKET[column], then=[_load(_ARGUMENT_0), *allowed, _fail(errno.EAFNOSUPPORT)])
    own = _if_equal(0, then=[_ALLOWED])
    program += _if_equal(_PRLIMIT[column], then=[_load(_ARGUMENT_0), *own, _fail(errno.EPERM)])
    program.append(_ALLOWED)
    return b"".join(program)


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


_ALLOWED = _instruction(_RETURN, _ALLOW)


def _load(offset: int) -> bytes:
    return _instruction(_LOAD, offset)


def _fail(number: int) -> bytes:
    return _instruction(_RETURN, _ERRNO | number)


def _if_equal(value: int, then: list[bytes]) -> list[bytes]:
    return [_instruction(_JUMP_EQUAL, value, 0, len(then)), *then]


def _unless_equal(value: int, then: list[bytes]) -> list[bytes]:
    return [_instruction(_JUMP_EQUAL, value, len(then), 0), *then]


def _if_any_bit(mask: int, then: bytes) -> list[bytes]:
    return [_instruction(_JUMP_ANY_BIT, mask, 0, 1), then]
