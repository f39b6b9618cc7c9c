"""What must hold before any process starts; `manage.py` refuses to run a command otherwise, and `prorl doctor` lists it."""

from __future__ import annotations

import importlib.util
from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Error, register

TAG = "prorl"
_SCHEMES = ("amqp", "amqps", "pyamqp")


@register(TAG)
def broker(**_: Any) -> list[CheckMessage]:
    scheme, separator, _rest = settings.BROKER_URL.partition("://")
    if not settings.BROKER_URL or (separator and scheme in _SCHEMES):
        return []
    what = f"The broker is {scheme}://…" if separator else "PRORL_BROKER_URL is no URL"
    return [
        Error(
            f"{what}, and only RabbitMQ can be used.",
            hint="Set PRORL_BROKER_URL=amqp://user:password@host//, or leave it empty on a single machine. "
            "(Redis delivers messages again after a timeout and loses them when it is restarted.)",
            id="prorl.E001",
        )
    ]


@register(TAG)
def traces(**_: Any) -> list[CheckMessage]:
    if not settings.OTEL_ENDPOINT or importlib.util.find_spec("opentelemetry"):
        return []
    return [
        Error(
            "PRORL_OTEL_ENDPOINT is set, and OpenTelemetry is not installed.",
            hint="Run `pip install prorl-site[otel]`, or unset it.",
            id="prorl.E003",
        )
    ]


@register(TAG)
def lease(**_: Any) -> list[CheckMessage]:
    if settings.HEARTBEAT_SECONDS * 2 <= settings.LEASE_SECONDS:
        return []
    return [
        Error(
            f"A lease of {settings.LEASE_SECONDS:g} s ends before two heartbeats ({settings.HEARTBEAT_SECONDS:g} s each): "
            "one that is late loses all the worker's rollouts.",
            hint="Raise PRORL_LEASE_SECONDS or lower PRORL_HEARTBEAT_SECONDS; a lease of ten heartbeats is good.",
            id="prorl.E002",
        )
    ]
