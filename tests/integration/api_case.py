"""Who talks to the API in its tests: three keys of one project, a stranger with another project's, and nobody."""

from __future__ import annotations

from typing import Any

from rest_framework.response import Response
from rest_framework.test import APIClient

from rollouts.models import (
    Dataset,
    Environment,
    Group,
    IdempotentResponse,
    LLMServer,
    Policy,
    Project,
    Rollout,
    RolloutEvent,
    Run,
    Task,
)
from rollouts.services.keys import issue_key
from tests.integration.domain import Domain

_COUNTED = [Dataset, Environment, Group, IdempotentResponse, LLMServer, Policy, Rollout, RolloutEvent, Run, Task]


def client_for(secret: str = "") -> APIClient:
    """An HTTP client with an API key, or without one."""
    client = APIClient()
    client.default_format = "json"
    if secret:
        client.credentials(HTTP_AUTHORIZATION=f"Bearer {secret}")
    return client


def secret_for(project: Project, scope: str) -> str:
    return issue_key(project=project, name=f"a {scope} key", scopes=[scope]).secret


class ApiCase:
    """Two projects alike, and everybody who may try to reach the first one."""

    def __init__(self) -> None:
        self.domain = Domain("alpha")
        self.other = Domain("beta")
        self.owner_secret = secret_for(self.domain.project, "admin")
        self.owner = client_for(self.owner_secret)
        self.submitter = client_for(secret_for(self.domain.project, "submit"))
        self.reader = client_for(secret_for(self.domain.project, "read"))
        self.stranger = client_for(secret_for(self.other.project, "admin"))
        self.nobody = client_for()

    @staticmethod
    def row_counts() -> dict[str, int]:
        """Of everything a request could create."""
        return {model.__name__: model._default_manager.count() for model in _COUNTED}

    def check_read_access(self, path: str) -> Any:
        """The owner and a read key may read `path`; a stranger does not find it; nobody is asked for a key."""
        expect_problem(self.stranger.get(path), 404, "not_found")
        self.check_list_access(path)
        return self.owner.get(path).json()

    def check_list_access(self, path: str) -> None:
        """As above, for lists that exist in every project."""
        expect_problem(self.nobody.get(path), 401, "not_authenticated")
        assert self.owner.get(path).status_code == 200
        assert self.reader.get(path).status_code == 200

    def check_write_access(self, method: str, path: str, body: Any = None, *, needs: str = "submit", own: bool = True) -> None:
        """A read key and nobody are refused; so is a submit key where admin is needed; a stranger does not find `own` paths."""
        before = self.row_counts()
        expect_problem(getattr(self.nobody, method)(path, body), 401, "not_authenticated")
        expect_problem(getattr(self.reader, method)(path, body), 403, "insufficient_scope")
        if needs == "admin":
            expect_problem(getattr(self.submitter, method)(path, body), 403, "insufficient_scope")
        if own:
            expect_problem(getattr(self.stranger, method)(path, body), 404, "not_found")
        assert self.row_counts() == before


def expect_problem(response: Response, status: int, code: str, *pointers: str) -> dict[str, Any]:
    """The answer is a problem of this code, and names every one of `pointers`."""
    assert response.status_code == status, response.content
    assert response.headers["Content-Type"] == "application/problem+json"
    problem: dict[str, Any] = response.json()
    assert problem.keys() - {"limit"} == {"type", "title", "status", "detail", "instance", "code", "errors"}
    assert (problem["code"], problem["status"]) == (code, status)
    named = {error["pointer"] for error in problem["errors"]}
    assert named >= set(pointers), problem
    return problem
