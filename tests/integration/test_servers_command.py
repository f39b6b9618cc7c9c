"""`prorl servers`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from prorl_site.cli import app
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.models import LLMServer, Project
from tests.integration.domain import Domain
from tests.services.model_servers import served

pytestmark = pytest.mark.django_db(transaction=True)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["servers", *arguments])
    assert "Traceback" not in result.output
    return result.exit_code, result.stdout, result.stderr


def test_a_server_is_drained_paused_resumed_probed_and_removed() -> None:
    url = Domain().server.url
    for action, said in (("drain", "draining"), ("pause", "paused"), ("resume", "live"), ("probe", "suspect")):
        code, out, err = run(action, url)
        assert (code, err) == (0, "")
        assert out.startswith(f"{url}: {said}.")
    code, out, _ = run("list")
    assert code == 0
    assert url in out and "suspect" in out and "0/8" in out
    LLMServer.objects.update(weights_unknown=True)
    assert "A weight update failed on this server." in run("resume", url)[2]
    assert run("resume", url, "--policy-version", "3")[0] == 0
    assert LLMServer.objects.get().policy_version == 3
    assert run("remove", str(LLMServer.objects.get().pk))[0] == 0
    assert not LLMServer.objects.exists()
    assert "No LLM server is registered" in run("list")[1]


def test_a_server_whose_model_sees_says_so() -> None:
    Project.objects.create(name="alpha")
    seeing, blind = ScriptedServer(pictures=True), ScriptedServer()
    with served(seeing, blind):
        for server, said in ((seeing, "rollouts. It takes pictures.\n"), (blind, "rollouts.\n")):
            code, out, err = run("register", server.url, "tiny")
            assert (code, err) == (0, "")
            assert out.endswith(said)
    lines = run("list")[1].splitlines()[1:]
    assert {line.split()[0]: line.endswith("  takes pictures") for line in lines} == {seeing.url: True, blind.url: False}


def test_what_is_refused_says_why() -> None:
    url = Domain().server.url
    code, _, err = run("pause", "http://elsewhere")
    assert code == 1
    assert f"There is no server 'http://elsewhere'. Registered: {url}" in err
    code, _, err = run("register", "http://127.0.0.1:9", "tiny")
    assert code == 1
    assert err.endswith("did not answer as an LLM server: http://127.0.0.1:9/v1/models is unreachable: Connection refused\n")
    for url, fix in (("gpu-1:8000", "such as http://gpu-1:8000."), ("http://gpu-1:8000/v1", "without /v1: http://gpu-1:8000.")):
        code, _, err = run("register", url, "tiny")
        assert code == 1
        assert fix in err
    assert "Must be at least 1." in run("register", "http://gpu-1:8000", "tiny", "--max-model-len", "0")[2]
    assert "Use one of hermes" in run("register", "http://gpu-1:8000", "tiny", "--tool-format", "none")[2]
    Project.objects.create(name="beta")
    code, _, err = run("register", "http://127.0.0.1:9", "tiny")
    assert code == 1
    assert "Name the project with --project. There are: alpha, beta." in err
    assert LLMServer.objects.count() == 1
