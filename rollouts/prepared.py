"""Statements that are planned once for each connection: those of every rollout, and of every round of the dispatcher."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import psycopg
from django.db import connection


def execute_prepared(statement: str, parameters: Mapping[str, Any] = MappingProxyType({})) -> list[tuple[Any, ...]]:
    """Run a statement as prepared by the server, in the current transaction if there is one, and return its rows.

    Django's own cursors put the values into the text, which the server then has to parse and plan every time: for these long
    statements that takes longer than carrying them out. PRORL_DB_PREPARE=false is for connection poolers that cannot keep them.
    """
    connection.ensure_connection()
    with connection.wrap_database_errors, psycopg.Cursor(connection.connection) as cursor:
        cursor.execute(statement.encode(), parameters, prepare=True)
        return cursor.fetchall()
