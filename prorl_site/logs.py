"""Logs of every process: one JSON object a line (for people, where standard error is a terminal), secrets removed.

A line is an event and its fields: `logger.info("stage ended", seconds=1.2)`. What a block of work belongs to is said once, by
`bound`, and then stands on every line written inside it, whichever library writes it. No Django here.
"""

from __future__ import annotations

import functools
import json
import logging.config
import re
import sys
from collections.abc import MutableMapping
from contextlib import AbstractContextManager
from typing import Any

import structlog
from structlog.typing import EventDict, WrappedLogger

FORMATS = ("auto", "json", "console")
REDACTED = "[redacted]"

_SECRET_MARKS = ("prl_", "whsec_", "earer ", "://")
_SECRET_KEY = re.compile(r"authorization|cookie|password|passwd|secret|api[_-]?key$|(^|_)token$", re.IGNORECASE)
# API keys, webhook secrets, bearer tokens, passwords in URLs: also inside sentences and tracebacks.
_SECRET_TEXT = re.compile(r"\b(prl_|whsec_)[\w+/=.-]+|\b([Bb]earer )[\w+/=.~-]+|(?<=://)([^\s:/@\"']*:)[^\s/@\"']+(?=@)")


def bound(**fields: Any) -> AbstractContextManager[None]:
    """Put these fields on every line that is logged inside the block, and inside the asyncio tasks that it starts.

    For a rollout's work: rollout, attempt, run, project, node, stage, worker.
    """
    return structlog.contextvars.bound_contextvars(**fields)


def settings(*, level: str, format: str) -> dict[str, Any]:
    """Django's LOGGING. `format` is one of FORMATS; `auto` writes for people on a terminal and JSON elsewhere."""
    people = format == "console" or (format == "auto" and sys.stderr.isatty())
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"lines": {"()": "prorl_site.logs.formatter", "people": people}},
        "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "lines"}},
        "root": {"handlers": ["stderr"], "level": level},
        "loggers": {
            "django.request": {"level": "ERROR"},
            # A line for every message received and every job done says nothing that the database does not.
            "celery": {"level": "WARNING"},
            "httpx": {"level": "WARNING"},
            # uvicorn brings handlers of its own; `prorl_site.request_log` writes the line of a request.
            "uvicorn": {"handlers": [], "propagate": True},
            "uvicorn.error": {"level": "WARNING"},
            "uvicorn.access": {"handlers": [], "level": "WARNING", "propagate": True},
        },
    }


def configure(config: dict[str, Any]) -> None:
    """Django's LOGGING_CONFIG: the standard library's loggers, structlog's and Python's warnings end in the same handler."""
    logging.config.dictConfig(config)
    logging.captureWarnings(True)
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *_common(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def formatter(*, people: bool) -> logging.Formatter:
    """Renders a record, whoever wrote it, as one line."""
    renderer = _render_for_people() if people else _render_as_json
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_common(),
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _redact_fields, renderer, _redact_text],
    )


def _common() -> list[structlog.typing.Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]


def _redact_fields(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    return _without_secrets(event)


def _without_secrets(fields: MutableMapping[str, Any]) -> dict[str, Any]:
    return {
        name: REDACTED if _is_secret(name) else _without_secrets(value) if isinstance(value, dict) else value
        for name, value in fields.items()
    }


@functools.lru_cache(maxsize=4096)
def _is_secret(name: object) -> bool:
    return isinstance(name, str) and _SECRET_KEY.search(name) is not None


def _redact_text(_: WrappedLogger, __: str, line: Any) -> str:
    text = str(line)
    if not any(mark in text for mark in _SECRET_MARKS):  # the search would cost as much as the rest of the line
        return text
    return _SECRET_TEXT.sub(lambda found: (found[1] or found[2] or found[3] or "") + REDACTED, text)


_with_traceback = structlog.processors.ExceptionRenderer()
_to_json = json.JSONEncoder(ensure_ascii=False, default=str, check_circular=False).encode


def _render_as_json(logger: WrappedLogger, method: str, event: EventDict) -> str:
    rest = _with_traceback(logger, method, event)
    first = {name: rest.pop(name) for name in ("at", "level", "event")}
    return _to_json({**first, **rest})


def _render_for_people() -> structlog.dev.ConsoleRenderer:
    return structlog.dev.ConsoleRenderer(
        colors=sys.stderr.isatty(), timestamp_key="at", exception_formatter=structlog.dev.plain_traceback
    )
