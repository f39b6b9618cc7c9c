"""Whatever is wrong with a request, the answer is problem+json with a stable code, and nothing has changed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import SuspiciousOperation
from django.db import OperationalError
from django.test import RequestFactory, override_settings
from rest_framework.test import APIClient

from rollouts.api import errors, problems
from rollouts.api.parsing import MAX_DEPTH
from rollouts.selectors import rollouts as selectors
from rollouts.services.errors import Refused
from tests.integration.api_case import ApiCase, client_for, expect_problem

REFERENCE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "errors.md"
RUNS = "/api/v1/runs/"


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


def post_raw(client: APIClient, body: bytes | str, content_type: str = "application/json") -> Any:
    return client.generic("POST", RUNS, body, content_type=content_type)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"{'name': 1}",
        b'{"name": NaN}',
        b'{"name": -Infinity}',
        b'{"name": "\xff"}',
        b"[" * 100_000,
        b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
        b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1),
        b'{"priority": ' + b"9" * 5000 + b"}",
        '{"name": "x"}'.encode("utf-16"),
        b" ",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_what_is_not_json_is_refused(case: ApiCase, body: bytes) -> None:
    before = case.row_counts()
    expect_problem(post_raw(case.submitter, body), 400, "malformed_json")
    assert case.row_counts() == before


@pytest.mark.parametrize(
    ("body", "pointer"),
    [
        (r'{"name": "a\u0000b", "policy": "tiny"}', "/name"),
        (r'{"name": "a\ud800b", "policy": "tiny"}', "/name"),
        (r'{"name": "x", "policy": "tiny", "settings": {"a/b": [1, "\u0000"]}}', "/settings/a~1b/1"),
        (r'{"na\u0000me": "x", "policy": "tiny"}', ""),
        ('{"name": "x", "policy": "tiny", "priority": 1e400}', "/priority"),
    ],
)
def test_what_the_database_cannot_store_is_refused(case: ApiCase, body: str, pointer: str) -> None:
    expect_problem(post_raw(case.submitter, body), 422, "invalid", pointer)


@override_settings(DATA_UPLOAD_MAX_MEMORY_SIZE=1000)
def test_a_body_over_the_limit_is_refused(case: ApiCase) -> None:
    expect_problem(post_raw(case.submitter, json.dumps({"name": "x" * 1000})), 413, "body_too_large")


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "nonsense"]
)
def test_only_json_is_read(case: ApiCase, content_type: str) -> None:
    expect_problem(post_raw(case.submitter, "{}", content_type), 415, "unsupported_media_type")


def test_an_empty_body_lacks_its_fields(case: ApiCase) -> None:
    expect_problem(case.submitter.post(RUNS), 422, "invalid", "/name", "/policy")


@pytest.mark.parametrize("method", ["put", "patch", "delete", "options", "trace"])
def test_other_methods_are_not_allowed(case: ApiCase, method: str) -> None:
    for client in (case.reader, case.owner):
        answer = client.generic(method.upper(), RUNS)
        expect_problem(answer, 405, "method_not_allowed")


def test_other_representations_are_not_offered(case: ApiCase) -> None:
    expect_problem(case.reader.get(RUNS, HTTP_ACCEPT="text/csv"), 406, "not_acceptable")


@pytest.mark.parametrize("path", ["/api/", "/api/v1/", "/api/v1/runs", "/api/v1/runs/7/", "/api/v2/runs/", "/api/%00/"])
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_unrouted_paths_are_not_found(case: ApiCase, path: str, method: str) -> None:
    expect_problem(case.owner.generic(method, path), 404, "not_found")


@pytest.mark.parametrize(
    ("query", "parameter"),
    [
        ("limit=0", "?limit"),
        ("limit=501", "?limit"),
        ("limit=ten", "?limit"),
        ("limti=10", "?limti"),
        ("state=done", "?state"),
        ("run=7", "?run"),
        ("environment=a%00b", "?environment"),
        ("environment=", "?environment"),
        ("reward_min=nan", "?reward_min"),
        ("reward_max=inf", "?reward_max"),
        ("trainable=perhaps", "?trainable"),
        ("cause=bad%20luck", "?cause"),
    ],
)
def test_wrong_parameters_are_named(case: ApiCase, query: str, parameter: str) -> None:
    expect_problem(case.reader.get(f"/api/v1/rollouts/?{query}"), 400, "invalid_parameter", parameter)


@pytest.mark.parametrize("cursor", ["x", "%00", "AAAA", "bm90IGEgdXVpZA", "ä", "fn4"])
def test_forged_cursors_are_refused(case: ApiCase, cursor: str) -> None:
    expect_problem(case.reader.get(f"{RUNS}?cursor={cursor}"), 400, "invalid_cursor")
    results = f"{RUNS}{case.domain.run.id}/results/?after={cursor}"
    expect_problem(case.reader.get(results), 400, "invalid_cursor")


@pytest.mark.parametrize(
    "header",
    [
        "Bearer",
        "Bearer x",
        "Bearer prl_",
        "Bearer prl_00000000_secret",
        "Bearer prl_\x00_x",
        "Bearer ä",
        "Basic YTpi",
        "Token x",
    ],
)
def test_bad_keys_are_refused_with_a_challenge(case: ApiCase, header: str) -> None:
    answer = APIClient().get(RUNS, HTTP_AUTHORIZATION=header)
    expect_problem(answer, 401, "invalid_api_key")
    assert answer.headers["WWW-Authenticate"].startswith("Bearer realm=")


def test_no_key_is_told_how_to_send_one(case: ApiCase) -> None:
    answer = client_for().get(RUNS)
    assert "Authorization" in expect_problem(answer, 401, "not_authenticated")["detail"]
    assert answer.headers["WWW-Authenticate"].startswith("Bearer realm=")


def test_answers_are_not_cached(case: ApiCase) -> None:
    assert case.reader.get(RUNS).headers["Cache-Control"] == "no-store"


def test_a_database_that_is_away_is_a_503_to_repeat(case: ApiCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(project: Any) -> Any:
        raise OperationalError("connection refused")

    monkeypatch.setattr(selectors, "runs_of", away)
    answer = case.reader.get(RUNS)
    expect_problem(answer, 503, "unavailable")
    assert answer.headers["Retry-After"] == "1"


def test_a_defect_is_a_500_that_tells_nothing(case: ApiCase, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(project: Any) -> Any:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(selectors, "runs_of", broken)
    case.reader.raise_request_exception = False
    answer = case.reader.get(RUNS)
    expect_problem(answer, 500, "internal_error")
    assert b"secret detail" not in answer.content


def test_errors_outside_of_views_look_the_same(rf: RequestFactory) -> None:
    for response, status in (
        (errors.handler500(rf.get(RUNS)), 500),
        (errors.handler400(rf.get(RUNS), SuspiciousOperation()), 400),
    ):
        assert response.status_code == status
        assert response.headers["Content-Type"] == "application/problem+json"
        assert json.loads(response.content)["status"] == status
    assert errors.handler500(rf.get("/runs/")).headers["Content-Type"].startswith("text/html")
    assert errors.handler400(rf.get("/runs/"), SuspiciousOperation()).headers["Content-Type"].startswith("text/html")


def test_every_code_is_documented_with_its_status() -> None:
    rows = [line.split("|") for line in REFERENCE.read_text().splitlines() if line.startswith("| `")]
    documented = {row[1].strip(" `"): int(row[2]) for row in rows}
    assert documented == {code: kind.status for code, kind in problems.KINDS.items()}


def test_every_refusal_of_a_service_has_a_code_of_its_status() -> None:
    refusals = {Refused, *Refused.__subclasses__()}
    assert {(kind.code, kind.status) for kind in refusals} <= {(code, kind.status) for code, kind in problems.KINDS.items()}
