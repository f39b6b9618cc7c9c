"""What load balancers and supervisors ask the web server. Open to everyone, so answers name no host and no error text.

Workers and the dispatcher have no port: a worker's sign of life is its lease, the dispatcher's its last pass (`prorl doctor`).
"""

from __future__ import annotations

from typing import Any

import psycopg
from django.db.migrations.loader import MigrationLoader
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from prorl_site.database import own_connection

_PATIENCE_SECONDS = 2


@never_cache
@require_safe
def livez(request: HttpRequest) -> HttpResponse:
    """This process answers; it asks nobody else. Restart it when this fails."""
    return HttpResponse("ok\n", content_type="text/plain")


@never_cache
@require_safe
def readyz(request: HttpRequest) -> JsonResponse:
    """Whether requests can be served here: 200, or 503 with what is missing. Send none while this fails.

    The broker and the dispatcher do not count: what is submitted while they are away waits in the database.
    """
    problems = _problems()
    components = {name: {"ready": not problem, "reason": problem} for name, problem in problems.items()}
    ready = not any(problems.values())
    return JsonResponse({"ready": ready, "components": components}, status=200 if ready else 503)


def _problems() -> dict[str, str]:
    """Component -> what is wrong with it, or an empty string."""
    try:
        with own_connection(patience=_PATIENCE_SECONDS) as database:
            missing = missing_migrations(database)
    except psycopg.Error:
        return {"database": "does not answer", "migrations": "unknown"}
    return {"database": "", "migrations": f"{missing} not applied; run `python -m django migrate`" if missing else ""}


def missing_migrations(database: psycopg.Connection[Any]) -> int:
    """How many of this version's migrations the database does not have."""
    try:
        applied = set(database.execute("SELECT app, name FROM django_migrations").fetchall())
    except psycopg.errors.UndefinedTable:
        applied = set()
    return len(set(MigrationLoader(None).disk_migrations) - applied)
