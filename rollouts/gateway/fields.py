"""Reading an agent's JSON: what is of the wrong type is refused by the name of its field, and null counts as absent."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, Self

import orjson

from rollouts.gateway.errors import CallRefused, Kind, refuse

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1000
MAX_NAME_CHARACTERS = 500
MAX_ITEMS = 20_000  # of any list; more would hold up everybody else for seconds


class Fields:
    """One object of a request. `path` is where it stands, for messages."""

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, dict):
            raise refuse(path or "body", "must be a JSON object")
        self._values: Mapping[str, Any] = value
        self._path = path

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """A request's body."""
        try:
            value = orjson.loads(body)
            orjson.dumps(value)  # of a depth that we can write again
        except (ValueError, TypeError) as exc:
            raise CallRefused(Kind.INVALID, f"the body is not JSON that can be used: {exc}", field="body") from exc
        return cls(value)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """Whatever is there; None where nothing is."""
        return self._values.get(name)

    def place(self, name: str) -> str:
        """The full name of a field."""
        return f"{self._path}.{name}" if self._path else name

    def refuse(self, name: str, message: str) -> CallRefused:
        """The error to raise about a field."""
        return refuse(self.place(name), message)

    def text(self, name: str, default: str = "") -> str:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "must be a string")
        return value

    def model(self) -> str:
        """The model that is asked for. It is repeated in every chunk of an answer."""
        name = self.text("model")
        if len(name) > MAX_NAME_CHARACTERS:
            raise self.refuse("model", f"must be a string of up to {MAX_NAME_CHARACTERS} characters")
        return name

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "must be true or false")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self._values.get(name)
        if value is None:
            return None
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not low <= value <= high
        ):
            raise self.refuse(name, f"must be a number from {low:g} to {high:g}")
        return float(value)

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not _is_number(value) or value != int(value) or not low <= value <= high:
            raise self.refuse(name, f"must be a whole number from {low} to {high}")
        return int(value)

    def object(self, name: str) -> Fields | None:
        value = self._values.get(name)
        return None if value is None else Fields(value, self.place(name))

    def required(self, name: str) -> Fields:
        """An object that must be there."""
        found = self.object(name)
        if found is None:
            raise self.refuse(name, "is required")
        return found

    def items(self, name: str) -> list[Any]:
        """A list; empty where nothing is."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refuse(name, "must be a list")
        if len(value) > MAX_ITEMS:
            raise self.refuse(name, f"must be a list of up to {MAX_ITEMS} items")
        return value

    def objects(self, name: str) -> list[Fields]:
        """A list of objects; empty where nothing is."""
        return [Fields(value, f"{self.place(name)}.{index}") for index, value in enumerate(self.items(name))]

    def texts(self, name: str, limit: int = MAX_STOPS) -> tuple[str, ...]:
        """One non-empty string or a list of them."""
        value = self._values.get(name)
        values = [value] if isinstance(value, str) else self.items(name)
        if len(values) > limit or not all(isinstance(one, str) and 0 < len(one) <= MAX_STOP_CHARACTERS for one in values):
            form = f"none of them empty or longer than {MAX_STOP_CHARACTERS} characters"
            raise self.refuse(name, f"must be a string or a list of up to {limit} strings, {form}")
        return tuple(values)

    def only(self, known: Collection[str], harmless: Mapping[str, Any]) -> None:
        """Refuse what is neither `known` nor of the value that `harmless` gives for it (`...`: any)."""
        for name, value in self._values.items():
            if name in known or value is None:
                continue
            if name not in harmless:
                raise self.refuse(name, "is not supported; leave it out")
            if harmless[name] is not ... and value != harmless[name]:
                raise self.refuse(name, f"only {orjson.dumps(harmless[name]).decode()} is supported")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
