"""A database connection outside Django's pool, for what must not wait for it or must keep one."""

from __future__ import annotations

from typing import Any

import psycopg
from django.db import connection


def own_connection(*, patience: int | None = None) -> psycopg.Connection[Any]:
    """Connect in autocommit mode; the caller closes it. Raises psycopg.OperationalError.

    `patience`: whole seconds for connecting, and for each statement; without it as long as the server says.
    """
    parameters = {k: v for k, v in connection.get_connection_params().items() if k not in ("context", "cursor_factory", "pool")}
    if patience is not None:
        options = f"{parameters.get('options') or ''} -c statement_timeout={patience * 1000}".strip()
        parameters |= {"connect_timeout": patience, "options": options}
    return psycopg.connect(**parameters, autocommit=True)
