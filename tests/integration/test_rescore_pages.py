"""Scoring again from the dashboard, the admin, the command line and the client; and the pages that tell of it."""

from __future__ import annotations

from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client as Browser

from rollouts.models import Rescoring
from rollouts.services.rescoring import fail_rescoring
from tests.integration.domain import Domain
from tests.integration.test_rescore import BROKEN, eval_failed, newer_version, ran, rescored, scored, take


@pytest.fixture
def member(domain: Domain) -> Browser:
    user = User.objects.create_user("maria", password="correct horse")
    domain.project.members.add(user)
    browser = Browser()
    browser.force_login(user)
    return browser


def test_the_button_queues_the_rollout(domain: Domain, member: Browser):
    rollout = eval_failed(domain)
    page = member.get(f"/rollouts/{rollout.id}/reward/").content.decode()
    assert f"/rollouts/{rollout.id}/rescore/" in page
    answer = member.post(f"/rollouts/{rollout.id}/rescore/", follow=True)
    assert "will be scored again" in answer.content.decode()
    assert Rescoring.objects.get().rollout == rollout


def test_the_page_says_why_there_is_no_button(domain: Domain, member: Browser):
    rollout = ran(domain)
    assert "rescore" not in member.get(f"/rollouts/{rollout.id}/reward/").content.decode()
    answer = member.post(f"/rollouts/{rollout.id}/rescore/", follow=True)
    assert "It has not ended yet." in answer.content.decode()


def test_the_page_tells_of_both_versions_and_of_failures(domain: Domain, member: Browser):
    rollout = rescored(domain, scored(domain))
    Rescoring.objects.create(rollout=rollout, run=rollout.run, environment=rollout.environment)
    fail_rescoring(claim=take(domain), failure=BROKEN)
    page = member.get(f"/rollouts/{rollout.id}/reward/").content.decode()
    assert "Version 1" in page and "version 2" in page
    assert "KeyError" in page


def test_the_attempts_page_shows_each_failure(domain: Domain, member: Browser):
    rollout = eval_failed(domain)
    page = member.get(f"/rollouts/{rollout.id}/attempts/").content.decode()
    assert "gave up" in page
    assert "KeyError" in page


def test_strangers_do_not_find_it(domain: Domain):
    browser = Browser()
    browser.force_login(User.objects.create_user("sam", password="correct horse"))
    assert browser.post(f"/rollouts/{eval_failed(domain).id}/rescore/").status_code == 404
    assert not Rescoring.objects.exists()


@pytest.mark.parametrize("kind", ["rollout", "run"])
def test_the_admin_action(domain: Domain, admin_client: Browser, kind: str):
    rollout = eval_failed(domain)
    chosen = rollout.id if kind == "rollout" else rollout.run_id
    form = {"action": "rescore", "_selected_action": [str(chosen)]}
    answer = admin_client.post(f"/admin/rollouts/{kind}/", form, follow=True)
    assert "will be scored again" in answer.content.decode()
    assert Rescoring.objects.get().rollout == rollout
    assert str(rollout.id) in admin_client.get("/admin/rollouts/rescoring/").content.decode()
    assert "evaluation_error" in admin_client.get(f"/admin/rollouts/rollout/{rollout.id}/change/").content.decode()


def test_the_admin_says_why_not(domain: Domain, admin_client: Browser):
    form = {"action": "rescore", "_selected_action": [str(ran(domain).id)]}
    answer = admin_client.post("/admin/rollouts/rollout/", form, follow=True)
    assert "It has not ended yet." in answer.content.decode()


def run_command(*arguments: str) -> str:
    out = StringIO()
    call_command("rescore", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_for_a_run_and_a_rollout(domain: Domain):
    rollout, newer = eval_failed(domain), newer_version(domain)
    assert run_command(str(rollout.run_id), "--environment", "sums@2", "--only-cause", "evaluation_error").startswith(
        "1 queued"
    )
    assert Rescoring.objects.get().environment == newer
    other = scored(domain)
    assert "is queued" in run_command(str(other.id))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["00000000-0000-0000-0000-000000000000"], "There is no run and no rollout"),
        (["{rollout}", "--environment", "sums@9"], "there is sums@1"),
        (["{rollout}", "--environment", "nothing"], "there is none"),
        (["{rollout}", "--only-cause", "evaluation_error"], "for runs"),
        (["{unfinished}"], "not ended yet"),
    ],
)
def test_the_command_refuses_with_a_reason(domain: Domain, arguments: list[str], complaint: str):
    ids = {"rollout": scored(domain).id, "unfinished": ran(domain).id}
    with pytest.raises(CommandError, match=complaint):
        run_command(*(argument.format(**ids) for argument in arguments))
    assert not Rescoring.objects.exists()
