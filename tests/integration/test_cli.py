"""The `prorl` command: what it refuses is one line that says why, never a traceback."""

from __future__ import annotations

import json
import uuid

import pytest
from typer.testing import CliRunner

from prorl_site.cli import app
from rollouts.lifecycle import State
from rollouts.models import Node
from tests.integration.domain import Domain

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rescore", str(uuid.UUID(int=1))], "prorl: There is no run and no rollout"),
        (["rescore", "abc"], "Invalid value for 'id'"),
        (["nodes", "drain", "gpu-1"], "prorl: There is no node 'gpu-1'"),
        (["check-tokens", str(uuid.UUID(int=1))], "prorl: there is no run"),
    ],
)
def test_refusals(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code in (1, 2)
    assert said in result.stderr
    assert "Traceback" not in result.output


def test_commands_do_what_they_say(domain: Domain) -> None:
    domain.worker(node="gpu-1")
    rollout = domain.rollout_in(State.CANCELLED)
    for arguments, said in (
        (["rescore", str(rollout.run_id)], "0 queued, 0 going on already, 1 cannot be scored again"),
        (["nodes", "drain", "gpu-1"], "gpu-1 drains"),
        (["nodes", "list"], "gpu-1"),
        (["prune", "--dry-run"], "0  trajectories would go"),
        (["check-tokens"], "0 calls checked; attempts: none; 0 wrong"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert said in result.stdout
    assert Node.objects.get(name="gpu-1").draining_since is not None


def test_the_doctor_reports_as_json_and_by_its_exit_code(domain: Domain) -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert not report["ok"]
    assert all(finding["remedy"] for finding in report["findings"] if finding["status"] != "ok")
