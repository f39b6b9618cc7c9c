"""Columns the domain needs: time-ordered ids, packed token arrays, and choices of its vocabularies."""

from __future__ import annotations

import array
import enum
import os
import sys
import time
import uuid
from typing import TYPE_CHECKING, Any

from django.core.exceptions import ValidationError
from django.db import models

if TYPE_CHECKING:
    _BinaryField = models.BinaryField[Any, Any]
else:
    _BinaryField = models.BinaryField

_TO_LITTLE_ENDIAN = sys.byteorder == "big"


def uuid7() -> uuid.UUID:
    """A time-ordered UUID (RFC 9562 version 7), so that primary keys are inserted at the end of their index."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | 7 << 76
    value = value & ~(0b11 << 62) | 0b10 << 62
    return uuid.UUID(int=value)


def choices(vocabulary: type[enum.StrEnum]) -> list[tuple[str, str]]:
    """A vocabulary as the choices of a column."""
    return [(member.value, member.value) for member in vocabulary]


class _PackedArrayField(_BinaryField):
    """A list of numbers in a `bytea` of fixed-width little-endian items: 4 bytes a token where JSON takes 7."""

    typecode: str

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        if value is not None and not isinstance(value, bytes | memoryview):
            value = self.pack(value)
        return super().get_db_prep_value(value, connection, prepared)

    def from_db_value(self, value: bytes | memoryview | None, expression: Any, connection: Any) -> list[Any] | None:
        return None if value is None else self.unpack(bytes(value))

    def to_python(self, value: Any) -> Any:
        return self.unpack(bytes(value)) if isinstance(value, bytes | memoryview) else value

    @classmethod
    def pack(cls, values: Any) -> bytes:
        try:
            packed = array.array(cls.typecode, values)
        except (TypeError, OverflowError) as error:
            raise ValidationError(f"not an array of numbers that fit: {error}") from error
        if _TO_LITTLE_ENDIAN:
            packed.byteswap()
        return packed.tobytes()

    @classmethod
    def unpack(cls, data: bytes) -> list[Any]:
        values = array.array(cls.typecode)
        values.frombytes(data)
        if _TO_LITTLE_ENDIAN:
            values.byteswap()
        return values.tolist()


class TokenIdsField(_PackedArrayField):
    """Token ids, 32-bit."""

    typecode = "i"


class LogprobsField(_PackedArrayField):
    """Natural-log probabilities, 32-bit floats: what inference engines compute in."""

    typecode = "f"
