"""What models, programs and environments hand us, as Postgres takes it: no NUL character and no lone surrogate."""

from __future__ import annotations

from typing import Any


def storable_text(text: str) -> str:
    """NUL becomes its visible symbol, half a surrogate pair a question mark."""
    return text.replace("\x00", "\N{SYMBOL FOR NULL}").encode("utf-8", "replace").decode("utf-8")


def storable_json(value: Any) -> Any:
    """The same for every text in a JSON value, keys included."""
    if isinstance(value, dict):
        return {storable_text(key): storable_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable_json(item) for item in value]
    return storable_text(value) if isinstance(value, str) else value
