"""What a log line looks like, and what it never shows."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from prorl_site import logs


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What a handler with our formatter writes."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.formatter(people=False))
    root = logging.getLogger()
    root.addHandler(handler)
    yield stream
    root.removeHandler(handler)


def _parsed(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_an_event_with_fields_and_with_what_its_work_belongs_to(lines: io.StringIO):
    with logs.bound(rollout="r1", attempt=2, node="gpu-1"):
        structlog.get_logger("rollouts.somewhere").info("stage ended", seconds=1.5)
    (line,) = _parsed(lines)
    assert line.pop("at")
    assert line == {
        "level": "info",
        "event": "stage ended",
        "seconds": 1.5,
        "rollout": "r1",
        "attempt": 2,
        "node": "gpu-1",
        "logger": "rollouts.somewhere",
    }


def test_other_libraries_lines_look_the_same_and_carry_the_same_context(lines: io.StringIO):
    with logs.bound(rollout="r1"):
        logging.getLogger("aiohttp.client").warning("retrying %s", "soon")
    (line,) = _parsed(lines)
    assert (line["event"], line["rollout"], line["logger"]) == ("retrying soon", "r1", "aiohttp.client")


def test_the_context_ends_with_its_block(lines: io.StringIO):
    with logs.bound(rollout="r1"):
        pass
    logging.getLogger("x").warning("after")
    assert "rollout" not in _parsed(lines)[0]


def test_a_traceback_stays_in_its_line(lines: io.StringIO):
    try:
        raise ValueError("wrong")
    except ValueError:
        structlog.get_logger("x").exception("broken")
    (line,) = _parsed(lines)
    assert "ValueError: wrong" in str(line["exception"])
    assert "\n" in str(line["exception"])


SECRETS = [
    "prl_1a2b3c4d_Zm9vYmFy-x_y",
    "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw=",
    "Bearer sk-abc.def-123",
    "postgres://prorl:hunter2@db.cluster/prorl",
    "amqp://guest:hunter2@mq//",
]
_KEEPS = ("hunter2", "Zm9vYmFy", "MfKQ9r8", "sk-abc")


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("people", [False, True])
def test_secrets_are_removed_wherever_they_stand(secret: str, people: bool):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.formatter(people=people))
    logger = logging.getLogger("secrets")
    logger.addHandler(handler)
    logger.propagate = False
    try:
        logger.warning("connecting to %s failed", secret)
        structlog.get_logger("secrets").warning("failed", url=secret, nested={"deep": [secret]})
        try:
            raise ConnectionError(f"cannot reach {secret}")
        except ConnectionError:
            logger.exception("failed")
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
    assert logs.REDACTED in stream.getvalue()
    assert not any(part in stream.getvalue() for part in _KEEPS)


def test_fields_with_the_name_of_a_secret_are_removed_and_counts_of_tokens_are_not(lines: io.StringIO):
    fields = {"api_key": "x1", "token": "x2", "password": "x3", "headers": {"Authorization": "x4", "Cookie": "x5"}}
    structlog.get_logger("x").warning("call", **fields, max_tokens=512, prompt_tokens=7)
    (line,) = _parsed(lines)
    assert not any(f'"x{n}"' in lines.getvalue() for n in range(1, 6))
    assert (line["max_tokens"], line["prompt_tokens"]) == (512, 7)


def _standard_error(code: str, **variables: str) -> str:
    env = {"PATH": os.environ["PATH"], "PRORL_SECRET_KEY": "x", **variables}
    setup = "import django, logging; django.setup(); "
    command = [sys.executable, "-c", setup + code]
    env |= {"DJANGO_SETTINGS_MODULE": "prorl_site.settings"}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stderr


def test_every_process_logs_json_unless_it_is_told_otherwise():
    line = json.loads(_standard_error("logging.getLogger('x').warning('hello')"))
    assert (line["event"], line["level"]) == ("hello", "warning")


def test_people_can_ask_for_lines_they_can_read():
    text = _standard_error("logging.getLogger('x').warning('hello')", PRORL_LOG_FORMAT="console")
    assert "hello" in text
    assert "{" not in text
