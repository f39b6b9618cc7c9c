"""Typed readers of `PRORL_*` environment variables. A bad value stops the process with the variable's name and the fix."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured


def text(name: str, default: str = "") -> str:
    """The variable, or the content of the file that `NAME_FILE` points at (for secrets)."""
    if file := os.environ.get(f"{name}_FILE"):
        try:
            return Path(file).read_text().strip()
        except OSError as error:
            raise ImproperlyConfigured(f"{name}_FILE={file} cannot be read: {error.strerror}.") from error
    return os.environ.get(name, default)


def boolean(name: str, default: bool) -> bool:
    value = os.environ.get(name, "").lower()
    if value in ("", "1", "true", "yes", "0", "false", "no"):
        return default if value == "" else value in ("1", "true", "yes")
    raise ImproperlyConfigured(f"{name}={value} is not a switch. Use 1 or 0.")


def number(name: str, default: float, *, minimum: float = 0) -> float:
    value = os.environ.get(name, "")
    try:
        result = float(value) if value else default
    except ValueError:
        raise ImproperlyConfigured(f"{name}={value} is not a number.") from None
    if result < minimum:
        raise ImproperlyConfigured(f"{name}={value} is below {minimum:g}.")
    return result


def integer(name: str, default: int, *, minimum: int = 0) -> int:
    result = number(name, default, minimum=minimum)
    if result != int(result):
        raise ImproperlyConfigured(f"{name}={result:g} is not a whole number.")
    return int(result)


def numbers(name: str, default: str) -> list[float]:
    """A comma-separated list of numbers that are not negative."""
    try:
        result = [float(word) for word in words(name, default)]
    except ValueError:
        result = [-1.0]
    if any(not 0 <= value < float("inf") for value in result):
        raise ImproperlyConfigured(f"{name}={text(name)} is not a list of numbers such as {default}.")
    return result


def words(name: str, default: str) -> list[str]:
    """A comma-separated list."""
    return [word.strip() for word in text(name, default).split(",") if word.strip()]


def json_object(name: str) -> dict[str, Any]:
    """A JSON object; empty when the variable is not set."""
    value = text(name)
    try:
        result = json.loads(value) if value else {}
    except ValueError as error:
        raise ImproperlyConfigured(f"{name} is not JSON: {error}.") from None
    if not isinstance(result, dict):
        raise ImproperlyConfigured(f'{name} is not a JSON object. Use {{"name": "value"}}.')
    return result


def var_dir() -> Path:
    """Where a machine's files live: `PRORL_VAR_DIR`, else `var/` in the clone or (an installed package) the current folder."""
    if chosen := os.environ.get("PRORL_VAR_DIR"):
        return Path(chosen).absolute()
    clone = Path(__file__).resolve().parent.parent
    return (clone if (clone / "manage.py").exists() else Path.cwd()) / "var"


def load_file(path: Path) -> None:
    """Take over `NAME=value` lines for variables that are not set. `prorl up` leaves such a file for other commands."""
    if not path.is_file():
        return
    for line in path.read_text().splitlines():
        name, separator, value = line.partition("=")
        if separator and name.startswith("PRORL_"):
            os.environ.setdefault(name, value)
