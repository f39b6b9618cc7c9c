"""Keys, scopes and the dashboard's login."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.utils import timezone

from rollouts.services.keys import issue_key, revoke_key
from tests.integration.api_case import ApiCase, client_for, expect_problem

RUNS = "/api/v1/runs/"
NEW_RUN = {"name": "grpo", "policy": "tiny"}


@pytest.fixture
def case(db: None) -> ApiCase:
    return ApiCase()


@pytest.fixture
def person(case: ApiCase) -> User:
    user = User.objects.create_user("ada", password="difference engine")
    case.domain.project.members.add(user)
    return user


def login(user: User, *, csrf: bool = False) -> Client:
    client = Client(enforce_csrf_checks=csrf)
    client.force_login(user)
    return client


def test_a_revoked_key_stops_working(case: ApiCase) -> None:
    issued = issue_key(project=case.domain.project, name="old", scopes=["read"])
    client = client_for(issued.secret)
    assert client.get(RUNS).status_code == 200
    revoke_key(key=issued.key)
    expect_problem(client.get(RUNS), 401, "invalid_api_key")


def test_an_expired_key_stops_working(case: ApiCase) -> None:
    issued = issue_key(project=case.domain.project, name="brief", scopes=["read"])
    issued.key.expires_at = timezone.now()
    issued.key.save()
    expect_problem(client_for(issued.secret).get(RUNS), 401, "invalid_api_key")


def test_a_key_with_several_scopes_has_the_widest(case: ApiCase) -> None:
    issued = issue_key(project=case.domain.project, name="both", scopes=["read", "submit"])
    assert client_for(issued.secret).post(RUNS, NEW_RUN).status_code == 201


def test_a_refusal_names_the_scope_that_is_missing(case: ApiCase) -> None:
    problem = expect_problem(case.reader.post(RUNS, NEW_RUN), 403, "insufficient_scope")
    assert "`submit`" in problem["detail"]


def test_a_member_sees_the_only_project(person: User) -> None:
    assert len(login(person).get(RUNS).json()["results"]) == 1


def test_a_member_of_several_projects_says_which(case: ApiCase, person: User) -> None:
    case.other.project.members.add(person)
    client = login(person)
    expect_problem(client.get(RUNS), 400, "project_required")
    for name in (case.other.project.name, case.other.project.id):
        [run] = client.get(f"{RUNS}?project={name}").json()["results"]
        assert run["id"] == str(case.other.run.id)


@pytest.mark.parametrize("name", ["beta", "no-such", "a%00b"])
def test_projects_without_membership_are_not_found(person: User, name: str) -> None:
    expect_problem(login(person).get(f"{RUNS}?project={name}"), 404, "not_found")


def test_a_person_without_projects_has_nothing(case: ApiCase) -> None:
    expect_problem(login(User.objects.create_user("bob")).get(RUNS), 400, "project_required")


def test_a_login_needs_the_csrf_token_to_write(case: ApiCase, person: User) -> None:
    client = login(person, csrf=True)
    expect_problem(client.post(RUNS, NEW_RUN, content_type="application/json"), 403, "csrf_failed")
    client.cookies["csrftoken"] = token = "x" * 32
    answer = client.post(RUNS, NEW_RUN, content_type="application/json", headers={"X-CSRFToken": token})
    assert answer.status_code == 201


def test_members_submit_but_only_staff_administer(case: ApiCase, person: User) -> None:
    body = {"name": "more", "handler": "arithmetic"}
    path = "/api/v1/environments/"
    expect_problem(login(person).post(path, body, content_type="application/json"), 403, "insufficient_scope")
    person.is_staff = True
    person.save()
    assert login(person).post(path, body, content_type="application/json").status_code == 201
