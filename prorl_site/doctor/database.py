"""PostgreSQL: does it answer, does it have room, does anything hold it back."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, LiteralString

import psycopg
from django.conf import settings
from django.db import connection
from django.utils import timezone

from prorl_site.database import own_connection
from prorl_site.health import missing_migrations
from rollouts.models import WorkerProcess

from .report import Finding, fail, ok, warn

_PATIENCE_SECONDS = 5
_OLDEST_SUPPORTED = 140000
_SLOW_SECONDS = 0.05
_LONG_TRANSACTION_SECONDS = 30.0
_LARGEST_SKEW_SECONDS = 1.0
_MAKE_ROOM = "Raise max_connections, lower PRORL_DB_POOL_SIZE, or run fewer processes; pg_stat_activity shows who holds them."
# While connecting there is no SQLSTATE to go by.
_FULL = ("too many clients", "too many connections", "remaining connection slots")
_CONNECTIONS_WITHOUT_POOL = 8  # what a process with PRORL_DB_POOL_SIZE=0 opens at most: one for each of its threads


def server() -> Iterator[Finding]:
    where = _where()
    try:
        with own_connection(patience=_PATIENCE_SECONDS) as database:
            begun = time.perf_counter()
            database.execute("SELECT 1")
            seconds = time.perf_counter() - begun
            version = database.info.server_version
    except psycopg.OperationalError as error:
        reason = " ".join(str(error).split())[:300]
        if any(sign in reason for sign in _FULL):
            yield fail("database", f"{where} has no connection left: {reason}", _MAKE_ROOM)
        else:
            yield fail("database", f"{where} does not answer: {reason}", "Start it, or correct PRORL_DATABASE_URL.")
        return
    found = f"PostgreSQL {version // 10000} at {where} answers in {seconds * 1000:.1f} ms"
    if version < _OLDEST_SUPPORTED:
        yield fail("database", found, "Use PostgreSQL 14 or newer.")
    elif seconds > _SLOW_SECONDS:
        yield warn("database", found, "Bring the workers nearer to it: each rollout asks it a few dozen times.")
    else:
        yield ok("database", found)


def migrations() -> Iterator[Finding]:
    with own_connection(patience=_PATIENCE_SECONDS) as database:
        missing = missing_migrations(database)
    if missing:
        yield fail("migrations", f"{missing} are not applied", "Run `python -m django migrate`.")
    else:
        yield ok("migrations", "all are applied")


def connections() -> Iterator[Finding]:
    """What the processes that are alive may open, against what the server allows."""
    with own_connection(patience=_PATIENCE_SECONDS) as database:
        allowed = _number(database, "SELECT current_setting('max_connections')::int")
        reserved = _number(database, "SELECT current_setting('superuser_reserved_connections')::int")
        used = _number(database, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'")
    workers = WorkerProcess.objects.filter(stopped_at=None, lost_at=None).count()
    each = settings.DB_POOL_SIZE or _CONNECTIONS_WITHOUT_POOL
    # One web process and the dispatcher, which keeps one more to listen.
    needed = (workers + 2) * each + 1
    found = (
        f"{used} of {allowed} in use; {workers} worker processes, a web server and the dispatcher may open {needed} "
        f"({each} each)"
    )
    if used >= 0.9 * (allowed - reserved):
        yield fail("connections", found, _MAKE_ROOM)
    elif needed > allowed - reserved:
        yield warn("connections", found, _MAKE_ROOM)
    else:
        yield ok("connections", found)


def transactions() -> Iterator[Finding]:
    with own_connection(patience=_PATIENCE_SECONDS) as database:
        row = database.execute(
            "SELECT EXTRACT(EPOCH FROM now() - xact_start)::float8, pid, usename, application_name FROM pg_stat_activity "
            "WHERE xact_start IS NOT NULL AND backend_xid IS NOT NULL AND pid <> pg_backend_pid() ORDER BY xact_start LIMIT 1"
        ).fetchone()
    if row is None or row[0] < _LONG_TRANSACTION_SECONDS:
        yield ok("transactions", "none that writes is open for long")
        return
    age, pid, user, application = row
    yield warn(
        "transactions",
        f"backend {pid} ({user}, {application or 'no name'}) has one open for {age:.0f} s; it holds back delivery of results",
        f"Find out who forgot it, or end it with `SELECT pg_terminate_backend({pid})`.",
    )


def clock() -> Iterator[Finding]:
    with own_connection(patience=_PATIENCE_SECONDS) as database:
        before = timezone.now()
        [(there,)] = database.execute("SELECT clock_timestamp()").fetchall()
        after = timezone.now()
    skew = (there - (before + (after - before) / 2)).total_seconds()
    found = f"the database's clock is {abs(skew):.2f} s {'ahead' if skew > 0 else 'behind'}"
    if abs(skew) > _LARGEST_SKEW_SECONDS:
        yield warn("clock", found, "Run NTP (chrony) on both hosts; times in histories and backoffs are off by as much.")
    else:
        yield ok("clock", found)


def _number(database: psycopg.Connection[Any], statement: LiteralString) -> int:
    [(number,)] = database.execute(statement).fetchall()
    return int(number)


def _where() -> str:
    """Without the password."""
    target = connection.settings_dict
    host = target["HOST"] or target["OPTIONS"].get("host") or "the local socket"
    return f"{host}{':' if target['PORT'] else ''}{target['PORT']}/{target['NAME']}"
