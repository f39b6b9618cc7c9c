"""`prorl sessions`: found, looked at and ended; the key is nowhere."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from typer.testing import CliRunner

from prorl_site.cli import app
from rollouts.lifecycle import GATEWAY
from rollouts.models import Rollout
from rollouts.services.lease import register_worker
from rollouts.services.sessions import Opened, open_session
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def gateway() -> None:
    register_worker(node="test-node", stage=GATEWAY, pid=1, concurrency=0)


def opened(domain: Domain, **more: Any) -> Opened:
    return open_session(project=domain.project, opened_by="API key abc", policy=domain.policy.name, **more)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["sessions", *arguments])
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, result.stderr


def listed(*arguments: str) -> list[str]:
    """The ids, as listed."""
    code, out, err = run("list", *arguments)
    assert (code, err) == (0, "")
    return [line.split()[0] for line in out.splitlines()[1:]]


def test_sessions_are_listed_by_project_and_state_newest_first() -> None:
    alpha, beta = Domain(), Domain("beta")
    assert "There is no such session." in run("list")[1]
    first, second, other = (str(opened(domain).session.pk) for domain in (alpha, alpha, beta))
    assert run("close", second, "--outcome", "abandoned")[0] == 0
    assert listed() == [other, second, first]
    assert listed("--limit", "2") == [other, second]
    assert listed("--project", "alpha") == [second, first]
    assert listed("--state", "running") == [other, first]
    assert listed("--project", "alpha", "--state", "cancelled") == [second]


def test_one_is_shown_without_its_key() -> None:
    session, key = opened(Domain(), metadata={"user": "ada"})
    code, out, _ = run("show", str(session.pk))
    assert code == 0
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert (facts["session"], facts["state"], facts["metadata"]) == (str(session.pk), "open", '{"user": "ada"}')
    for shown in (out, run("list")[1]):
        assert key not in shown and key.rpartition("_")[2] not in shown
    assert facts["key"] == f"{session.key_prefix}_…"


@pytest.mark.parametrize(
    ("arguments", "state", "cause", "reward"),
    [
        (["close"], "succeeded", "completed", None),
        (["close", "--reward", "-0.5", "--detail", "- looked at by hand"], "succeeded", "completed", -0.5),
        (["close", "--outcome", "failed"], "failed", "agent_failed", None),
        (["close", "--outcome", "abandoned"], "cancelled", "cancelled", None),
    ],
)
def test_one_is_ended(arguments: list[str], state: str, cause: str, reward: float | None) -> None:
    id_ = str(opened(Domain()).session.pk)
    verb, *options = arguments
    for _ in range(2):  # harmless when it is repeated
        code, out, err = run(verb, id_, *options)
        assert (code, err) == (0, "")
    assert cause in out
    rollout = Rollout.objects.get(pk=id_)
    assert (rollout.state, rollout.termination_cause, rollout.reward) == (state, cause, reward)


def test_one_is_cancelled_by_the_process_that_serves_it() -> None:
    id_ = str(opened(Domain()).session.pk)
    for _ in range(2):
        code, out, err = run("cancel", id_)
        assert (code, err) == (0, "")
        assert "cancelling" in out
    assert Rollout.objects.get(pk=id_).cancel_requested_at is not None


def test_what_is_refused_says_why() -> None:
    id_ = str(opened(Domain()).session.pk)
    for arguments, said in (
        (["show", str(uuid.UUID(int=1))], "There is no session 00000000-0000-0000-0000-000000000001."),
        (["cancel", "abc"], "Invalid value for 'SESSION'"),
        (["list", "--project", "gamma"], "There is no project 'gamma'. There are: alpha."),
        (["list", "--state", "asleep"], "invalid choice: 'asleep'"),
        (["list", "--limit", "0"], "--limit must be at least 1."),
        (["close", id_, "--outcome", "perfect"], "invalid choice: 'perfect'"),
        (["close", id_, "--outcome", "failed", "--reward", "1"], "A session that failed has no reward."),
        (["close", id_, "--reward", "nan"], "nan"),
    ):
        code, _, err = run(*arguments)
        assert code in (1, 2)
        assert said.lower() in err.lower()
    assert Rollout.objects.get(pk=id_).state == "running"
    assert run("close", id_, "--outcome", "abandoned")[0] == 0
    assert "The session has ended: cancelled" in run("close", id_)[2]
