"""The message broker. It only carries hints, so nothing is lost with it, but nothing starts without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import httpx
from django.conf import settings
from django.utils import timezone
from kombu import Connection
from kombu.exceptions import OperationalError

from prorl_site.celery import app
from prorl_site.checks import broker as unusable
from rollouts.lifecycle import Stage
from rollouts.models import WorkerProcess
from rollouts.services.dispatch import queue_name

from .report import Finding, fail, ok, warn

_PATIENCE_SECONDS = 5
_OLDEST_SUPPORTED = (3, 12)
_LIMITS = ("consumer-timeout", "message-ttl", "max-length", "expires")
_TIMEOUT_ADVICE = (
    "its consumer_timeout cannot be read from here and does not matter: workers acknowledge a message as soon as they have "
    "claimed what it names"
)


def server() -> Iterator[Finding]:
    """Reachable, and what it is."""
    if unusable():
        return  # `machine.settings` has said so
    if not settings.BROKER_URL:
        yield ok("broker", f"files in {settings.BROKER_DIR}, for workers of this machine only")
        return
    place = f"{urlsplit(settings.BROKER_URL).hostname}:{urlsplit(settings.BROKER_URL).port or 5672}"
    try:
        with _connected() as broker:
            yield _product(broker, place)
    except (OperationalError, OSError) as error:
        yield fail(
            "broker",
            f"{place} does not answer: {' '.join(str(error).split())[:200] or type(error).__name__}",
            "Start RabbitMQ, or correct PRORL_BROKER_URL. Submitted rollouts wait meanwhile; none is lost.",
        )


def queues() -> Iterator[Finding]:
    """Those of live workers. Declared as the workers do it, which changes nothing where they exist and are alike."""
    if not settings.BROKER_URL or unusable():
        return
    try:
        with _connected() as broker:
            for name in sorted(_expected()):
                yield _queue(broker, name)
    except (OperationalError, OSError):
        return  # `server` has said so
    if settings.RABBITMQ_MANAGEMENT_URL:
        yield from _management()


@contextmanager
def _connected() -> Iterator[Connection]:
    with app.connection_for_read(connect_timeout=_PATIENCE_SECONDS) as broker:
        broker.ensure_connection(max_retries=1, interval_start=0, timeout=_PATIENCE_SECONDS)
        yield broker


def _product(broker: Connection, place: str) -> Finding:
    said: dict[str, Any] = broker.connection.server_properties
    product, version = str(said.get("product", "an unknown broker")), str(said.get("version", "?"))
    found = f"{product} {version} at {place}; {_TIMEOUT_ADVICE}"
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if product != "RabbitMQ":
        return warn("broker", found, "Only RabbitMQ is tested.")
    if numbers < _OLDEST_SUPPORTED:
        return warn("broker", found, f"Use RabbitMQ {'.'.join(map(str, _OLDEST_SUPPORTED))} or newer.")
    return ok("broker", found)


def _queue(broker: Connection, name: str) -> Finding:
    try:
        channel: Any = broker.channel()
        with channel:
            waiting = channel.queue_declare(name, passive=True).message_count
    except broker.channel_errors:
        return warn("queues", f"{name} does not exist", "Its worker declares it when it starts; look at the worker's log.")
    try:
        with broker.channel() as other:
            app.amqp.queues.new_missing(name)(other).queue_declare()
    except broker.channel_errors as error:
        return fail(
            "queues",
            f"{name} is of another kind than workers declare it: {error}",
            "Delete it in RabbitMQ and start the workers again; its messages are only hints, and are sent again.",
        )
    return ok("queues", f"{name}: {waiting} messages")


def _expected() -> set[str]:
    live = WorkerProcess.objects.filter(
        stopped_at=None, lost_at=None, lease_expires_at__gt=timezone.now(), stage__in=list(Stage)
    )
    return {queue_name(Stage(stage), node) for stage, node in live.order_by().values_list("stage", "node").distinct()}


def _management() -> Iterator[Finding]:
    """What policies do to our queues; AMQP does not tell."""
    host = unquote(urlsplit(settings.BROKER_URL).path[1:]) or "/"
    url = f"{settings.RABBITMQ_MANAGEMENT_URL.rstrip('/')}/api/queues/{quote(host, safe='')}"
    try:
        found = httpx.get(url, timeout=_PATIENCE_SECONDS).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        reason = type(error).__name__
        yield warn("queues", f"the management API does not answer: {reason}", "Correct PRORL_RABBITMQ_MANAGEMENT_URL.")
        return
    for queue in found:
        policy = queue.get("effective_policy_definition") or {}
        limits = {name: policy[name] for name in _LIMITS if name in policy}
        if limits and queue["name"].startswith("rollouts."):
            yield warn(
                "queues", f"a policy limits {queue['name']}: {limits}", "Hints that it drops are sent again, only later."
            )
