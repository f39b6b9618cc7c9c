"""The system call `prctl`, which the standard library lacks, through what `ctypes` is made of, as that is slow to import."""

from __future__ import annotations

import _ctypes
import os
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

SET_DUMPABLE = 4
SET_SECCOMP = 22
SET_CHILD_SUBREAPER = 36
SET_NO_NEW_PRIVS = 38

_SECCOMP_MODE_FILTER = 2
_INSTRUCTION_BYTES = 8


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


class _Word(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "L"


class _Byte(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "c"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Int


_call = _Function(_ctypes.dlsym(_ctypes.dlopen(None, os.RTLD_NOW), "prctl"))  # type: ignore[arg-type]


def prctl(option: int, *values: int) -> None:
    """Raises OSError."""
    if _call(option, *(_Word(value) for value in (*values, 0, 0, 0, 0)[:4])) != 0:
        raise OSError(_ctypes.get_errno(), "prctl")


def refuse_system_calls(program: bytes) -> None:
    """Install a classic BPF program as system call filter, for good. Raises OSError."""
    instructions = _in_memory(program)
    header = _in_memory(struct.pack("@HP", len(program) // _INSTRUCTION_BYTES, _ctypes.addressof(instructions)))
    prctl(SET_NO_NEW_PRIVS, 1)
    prctl(SET_SECCOMP, _SECCOMP_MODE_FILTER, _ctypes.addressof(header))


def _in_memory(data: bytes) -> Any:
    """Where the kernel can read it for as long as the returned object lives."""

    class Bytes(_ctypes.Array):  # type: ignore[type-arg]
        _type_ = _Byte
        _length_ = len(data)

    return Bytes.from_buffer_copy(data)
