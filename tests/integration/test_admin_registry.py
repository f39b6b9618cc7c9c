"""The admin's forms: what they refuse and what they leave behind."""

from __future__ import annotations

import json

from django.test import Client
from pytest_django import DjangoAssertNumQueries

from rollouts.lifecycle import GATEWAY
from rollouts.models import ApiKey, Environment, LLMServer, Policy, PolicyVersion, Project, Rollout, Session, Task
from rollouts.services.keys import authenticate
from rollouts.services.lease import register_worker
from rollouts.services.session_closing import Outcome, close_session
from rollouts.services.sessions import open_session
from tests.integration.domain import Domain

ENVIRONMENTS = "/admin/rollouts/environment/"
SESSIONS = "/admin/rollouts/session/"


def environment_form(project: Project, **changed: str) -> dict[str, str]:
    return {
        "project": str(project.pk),
        "name": "products",
        "handler": "arithmetic",
        "config": "{}",
        "description": "",
        **changed,
    }


def errors_of(client: Client, path: str, form: dict[str, str]) -> dict[str, list[str]]:
    response = client.post(path, form)
    assert response.status_code == 200
    errors: dict[str, list[str]] = response.context["adminform"].form.errors
    return errors


def test_an_environment_is_stored_when_its_handler_accepts_the_configuration(domain: Domain, admin_client: Client) -> None:
    assert admin_client.post(f"{ENVIRONMENTS}add/", environment_form(domain.project)).status_code == 302
    stored = Environment.objects.get(name="products")
    assert (stored.version, stored.config) == (1, {})


def test_a_configuration_is_refused_at_its_field_with_the_place_inside(domain: Domain, admin_client: Client) -> None:
    form = environment_form(domain.project, config=json.dumps({"no_such_setting": 1}))
    errors = errors_of(admin_client, f"{ENVIRONMENTS}add/", form)
    assert list(errors) == ["config"]
    assert errors["config"][0].startswith("no_such_setting: ")
    broken = errors_of(admin_client, f"{ENVIRONMENTS}add/", environment_form(domain.project, config="{"))
    assert list(broken) == ["config"]
    assert not Environment.objects.filter(name="products").exists()


def test_only_installed_handlers_can_be_chosen(domain: Domain, admin_client: Client) -> None:
    errors = errors_of(admin_client, f"{ENVIRONMENTS}add/", environment_form(domain.project, handler="mystery"))
    assert list(errors) == ["handler"]


def test_an_unused_version_is_corrected_in_place(domain: Domain, admin_client: Client) -> None:
    admin_client.post(f"{ENVIRONMENTS}add/", environment_form(domain.project))
    environment = Environment.objects.get(name="products")
    form = {"handler": "arithmetic", "config": "{}", "description": "two factors", "_save": "Save"}
    assert admin_client.post(f"{ENVIRONMENTS}{environment.pk}/change/", form).status_code == 302
    environment.refresh_from_db()
    assert (environment.version, environment.description) == (1, "two factors")


def test_a_used_version_never_changes_but_can_be_saved_as_a_new_one(domain: Domain, admin_client: Client) -> None:
    path = f"{ENVIRONMENTS}{domain.environment.pk}/change/"
    page = admin_client.get(path).content.decode()
    assert 'name="_newversion"' in page
    assert 'name="_save"' not in page
    form = {"handler": "arithmetic", "config": "{}", "description": "changed"}
    refused = admin_client.post(path, {**form, "_save": "Save"}, follow=True)
    assert "Save it as a new version" in refused.content.decode()
    admin_client.post(path, {**form, "_newversion": "Save as new version"})
    versions = dict(Environment.objects.filter(name="sums").values_list("version", "description"))
    assert versions == {1: "", 2: "changed"}


def test_a_quarantined_task_tells_why(domain: Domain, admin_client: Client) -> None:
    task = Task.objects.create(dataset=domain.dataset, key="bad", payload={"a": "<b>"}, quarantine_reason="no gold answer")
    assert "no gold answer" in admin_client.get("/admin/rollouts/task/?quarantined=yes").content.decode()
    page = admin_client.get(f"/admin/rollouts/task/{task.pk}/change/").content.decode()
    assert "&lt;b&gt;" in page
    assert 'name="_save"' not in page


def test_a_keys_secret_is_shown_once_and_works(domain: Domain, admin_client: Client) -> None:
    form = {"project": str(domain.project.pk), "name": "trainer", "scopes": ["read", "submit"]}
    page = admin_client.post("/admin/rollouts/apikey/add/", form, follow=True).content.decode()
    secret = page.partition("The secret of trainer is ")[2].split(" ")[0]
    key = authenticate(secret)
    assert key is not None
    assert key.scopes == ["read", "submit"]
    for path in ("/admin/rollouts/apikey/", f"/admin/rollouts/apikey/{key.pk}/change/"):
        again = admin_client.get(path)
        assert again.status_code == 200
        assert secret not in again.content.decode()
        assert key.secret_sha256 not in again.content.decode()


def test_a_key_without_scopes_is_not_issued(domain: Domain, admin_client: Client) -> None:
    form = {"project": str(domain.project.pk), "name": "trainer"}
    assert list(errors_of(admin_client, "/admin/rollouts/apikey/add/", form)) == ["scopes"]
    assert not ApiKey.objects.exists()


def test_revoking_stops_a_key(domain: Domain, admin_client: Client) -> None:
    form = {"project": str(domain.project.pk), "name": "trainer", "scopes": ["read"]}
    page = admin_client.post("/admin/rollouts/apikey/add/", form, follow=True).content.decode()
    secret = page.partition("The secret of trainer is ")[2].split(" ")[0]
    action = {"action": "revoke", "_selected_action": [str(ApiKey.objects.get().pk)]}
    admin_client.post("/admin/rollouts/apikey/", action)
    assert authenticate(secret) is None


def test_a_server_that_does_not_answer_is_refused_at_its_url(domain: Domain, admin_client: Client) -> None:
    form = {
        "project": str(domain.project.pk),
        "url": "http://127.0.0.1:9",
        "policy_name": "new-policy",
        "policy_version": "0",
        "capacity": "4",
        "api_key": "very secret",
    }
    response = admin_client.post("/admin/rollouts/llmserver/add/", form)
    assert list(response.context["adminform"].form.errors) == ["url"]
    assert "very secret" not in response.content.decode()
    assert not Policy.objects.filter(name="new-policy").exists()


def test_a_servers_key_is_kept_and_never_shown(domain: Domain, admin_client: Client) -> None:
    LLMServer.objects.update(api_key="very secret", url="http://127.0.0.1:9")
    path = f"/admin/rollouts/llmserver/{domain.server.pk}/change/"
    assert "very secret" not in admin_client.get(path).content.decode()
    form = {"capacity": "16", "policy_version": "3", "new_api_key": ""}
    admin_client.post(path, form)
    stored = LLMServer.objects.values_list("capacity", "policy_version", "api_key")
    assert stored.get() == (16, 3, "very secret")
    refused = admin_client.post(path, {**form, "capacity": "17", "new_api_key": "another"})
    assert "url: " in refused.context["adminform"].form.non_field_errors()[0]
    assert stored.get() == (16, 3, "very secret")


def test_announced_versions_can_be_read_but_not_edited(domain: Domain, admin_client: Client) -> None:
    report = {str(domain.server.pk): {"state": "failed", "error": "<b>no such file</b>"}}
    version = PolicyVersion.objects.create(policy=domain.policy, version=1, state="failed", report=report)
    path = f"/admin/rollouts/policyversion/{version.pk}/change/"
    assert "&lt;b&gt;no such file" in admin_client.get(path).content.decode()
    assert admin_client.post(path, {"state": "live"}).status_code == 403
    assert admin_client.get("/admin/rollouts/policyversion/add/").status_code == 403


def test_servers_are_paused_resumed_and_probed_from_the_list(domain: Domain, admin_client: Client) -> None:
    def act(action: str) -> str:
        form = {"action": action, "_selected_action": [str(domain.server.pk)]}
        admin_client.post("/admin/rollouts/llmserver/", form, follow=True)
        return LLMServer.objects.get().state

    assert act("pause") == "paused"
    assert act("drain") == "draining"
    assert act("resume") == "live"
    assert act("probe") == "suspect"


def test_a_rollout_can_be_read_and_cancelled_but_not_edited(domain: Domain, admin_client: Client) -> None:
    rollout = domain.submit()[0]
    path = f"/admin/rollouts/rollout/{rollout.pk}/change/"
    assert admin_client.get(path).status_code == 200
    assert admin_client.post(path, {"state": "succeeded"}).status_code == 403
    assert admin_client.get("/admin/rollouts/rollout/add/").status_code == 403
    assert admin_client.post(f"/admin/rollouts/rollout/{rollout.pk}/delete/", {"post": "yes"}).status_code == 403
    admin_client.post("/admin/rollouts/rollout/", {"action": "cancel", "_selected_action": [str(rollout.pk)]})
    rollout.refresh_from_db()
    assert rollout.state == "cancelled"


def test_a_session_can_be_read_and_ended_but_not_edited(
    domain: Domain, admin_client: Client, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    register_worker(node="test-node", stage=GATEWAY, pid=1, concurrency=0)
    asked = {"project": domain.project, "policy": domain.policy.name, "opened_by": "API key abc"}
    first, second, third = (open_session(**asked, metadata={"user": "ada"}) for _ in range(3))
    with django_assert_max_num_queries(12):
        page = admin_client.get(SESSIONS).content.decode()
    found = admin_client.get(SESSIONS, {"q": second.session.key_prefix}).content.decode()
    assert str(second.session.pk) in found and str(first.session.pk) not in found
    detail = admin_client.get(f"{SESSIONS}{first.session.pk}/change/").content.decode()
    assert "ada" in detail
    stored = Session.objects.get(pk=first.session.pk)
    for secret in (first.key, first.key.rpartition("_")[2], stored.key_sha256):
        assert secret not in page + detail
    assert admin_client.post(f"{SESSIONS}{first.session.pk}/change/", {"opened_by": "me"}).status_code == 403
    assert admin_client.get(f"{SESSIONS}add/").status_code == 403
    assert admin_client.post(f"{SESSIONS}{first.session.pk}/delete/", {"post": "yes"}).status_code == 403

    for action, chosen in (("close", first), ("cancel", second)):
        admin_client.post(SESSIONS, {"action": action, "_selected_action": [str(chosen.session.pk)]})
    closed, cancelled, left = (Rollout.objects.get(pk=one.session.pk) for one in (first, second, third))
    assert (closed.state, left.state, left.cancel_requested_at) == ("succeeded", "running", None)
    assert cancelled.cancel_requested_at is not None
    close_session(session=third.session, outcome=Outcome.ABANDONED)
    refused = admin_client.post(SESSIONS, {"action": "close", "_selected_action": [str(third.session.pk)]}, follow=True)
    assert "The session has ended: cancelled" in refused.content.decode()


def test_every_list_of_the_admin_opens_with_few_queries(
    domain: Domain, admin_client: Client, django_assert_max_num_queries: DjangoAssertNumQueries
) -> None:
    domain.submit(8)
    registry = ["project", "environment", "dataset", "task", "policy", "policyversion", "llmserver", "apikey"]
    history = ["run", "group", "rollout", "session", "workerprocess"]
    for path in [*(f"rollouts/{name}" for name in [*registry, *history]), "sandboxes/sandbox"]:
        with django_assert_max_num_queries(14):
            assert admin_client.get(f"/admin/{path}/").status_code == 200, path
    assert Rollout.objects.count() == 8
