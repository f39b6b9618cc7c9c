"""What supervisors and load balancers see."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from django.db import connection
from django.test import Client

from prorl_site.embedded.processes import free_port


def test_a_process_that_answers_is_alive_and_asks_nobody(client: Client):
    # Without the `db` fixture a query would be an error.
    response = client.get("/livez")
    assert (response.status_code, response.content) == (200, b"ok\n")
    assert "no-store" in response.headers["Cache-Control"]


@pytest.mark.django_db(transaction=True)
class TestReadiness:
    def test_ready_with_a_migrated_database_and_without_a_login(self, client: Client):
        response = client.get("/readyz")
        assert response.status_code == 200
        assert response.json() == {
            "ready": True,
            "components": {"database": {"ready": True, "reason": ""}, "migrations": {"ready": True, "reason": ""}},
        }

    def test_not_ready_while_a_migration_is_missing(self, client: Client):
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM django_migrations WHERE app = 'rollouts' AND name = '0001_initial' RETURNING applied")
            (applied,) = cursor.fetchone()
        try:
            response = client.get("/readyz")
        finally:
            with connection.cursor() as cursor:
                cursor.execute(
                    "INSERT INTO django_migrations (app, name, applied) VALUES ('rollouts', '0001_initial', %s)", [applied]
                )
        assert response.status_code == 503
        assert response.json()["components"]["migrations"] == {
            "ready": False,
            "reason": "1 not applied; run `python -m django migrate`",
        }

    @pytest.mark.parametrize("method", ["post", "put", "delete"])
    @pytest.mark.parametrize("path", ["/livez", "/readyz"])
    def test_only_reading_is_answered(self, client: Client, method: str, path: str):
        assert getattr(client, method)(path).status_code == 405


_ASK = """
import django
django.setup()
from django.test import Client
client = Client()
for path in ("/livez", "/readyz"):
    response = client.get(path, headers={"host": "localhost"})
    print(path, response.status_code, response.content.decode().strip())
"""


def test_alive_but_not_ready_without_a_database_and_the_answer_names_no_host():
    """A process of its own, since this one has a database."""
    url = f"postgres://someone:hunter2@127.0.0.1:{free_port()}/prorl"
    env = {**os.environ, "PRORL_DATABASE_URL": url}
    done = subprocess.run([sys.executable, "-c", _ASK], env=env, capture_output=True, text=True, check=True)
    alive, ready = done.stdout.splitlines()
    assert alive == "/livez 200 ok"
    assert ready.startswith("/readyz 503")
    assert '"database": {"ready": false, "reason": "does not answer"}' in ready
    assert "127.0.0.1" not in done.stdout
    assert "hunter2" not in done.stdout + done.stderr


@pytest.mark.parametrize("given", ["trainer-42", "", "two words", "x" * 65])
def test_every_answer_has_a_request_id_and_a_usable_one_is_kept(client: Client, given: str):
    headers = {"X-Request-ID": given} if given else {}
    answered = client.get("/livez", headers=headers).headers["X-Request-ID"]
    assert (answered == given) == (given == "trainer-42")
    assert 0 < len(answered) <= 64
