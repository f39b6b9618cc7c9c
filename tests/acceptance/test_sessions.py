"""Agents outside any sandbox: real gateway processes, official clients, a scripted model."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai
import pytest

from prorl_site.embedded.processes import http_answers
from rollouts.client import Client, Session
from rollouts.llm.messages import data_url
from tests.acceptance.platform import Platform, running_platform, submit
from tests.pictures import png
from tests.services.ports import lasting_port

_KEY = """
import json
from rollouts.models import Project
from rollouts.services.keys import issue_key
print(json.dumps(issue_key(project=Project.objects.get(), name="agents", scopes=["submit"]).secret))
"""
_REGISTER = """
from rollouts.models import Project
from rollouts.services.servers import register_server
register_server(project=Project.objects.get(), url={url!r}, policy="sees", capacity=8)
"""
_RUNNING = re.compile(r"^vllm:num_requests_running\S* [1-9]", re.MULTILINE)
_TOOL: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
_CALL = json.dumps({"name": "weather", "arguments": {"city": "Kyiv"}})


class Site:
    """A platform with a web server, and gateway processes by name, each with a port of its own."""

    def __init__(self, platform: Platform, model: str, gateway_port: int) -> None:
        self.platform = platform
        self._ports = {"gateway": gateway_port}
        submit(platform, model, [{"n": 1, "environment": "sums", "payload": {"a": 1, "b": 1}}])
        self.client = Client(platform.start_web(), platform.shell(_KEY))

    def start_gateway(self, name: str = "gateway") -> str:
        """Its URL, the same at every start. One that runs is left as it is."""
        port = self._ports.setdefault(name, lasting_port())
        if (process := self.platform.processes.get(name)) is not None and process.poll() is None:
            return f"http://127.0.0.1:{port}/v1"
        self.platform.spawn(name, "django", "gateway", "--port", str(port))
        url = f"http://127.0.0.1:{port}"
        self.platform.wait_for(lambda: http_answers(f"{url}/readyz"), name)
        return f"{url}/v1"

    def wait_for(self, session: Session, state: str) -> dict[str, Any]:
        """The session, once its rollout is in this state."""
        self.platform.wait_for(lambda: self.client.session_info(session.id)["state"] == state, f"a session to be {state}")
        return dict(self.client.session_info(session.id))

    def calls(self, session: Session) -> list[dict[str, Any]]:
        return self.platform.rows("SELECT * FROM rollouts_modelcall WHERE rollout_id = %s ORDER BY turn", session.id)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, quick_model: str) -> Iterator[Site]:
    port = lasting_port()
    settings = {"gateway_port": port, "gateway_url": f"http://127.0.0.1:{port}", "db_pool_size": 4}
    with running_platform(tmp_path_factory.mktemp("platform") / "var", **settings) as platform:
        platform.start_dispatcher()
        site = Site(platform, quick_model, port)
        site.start_gateway()
        yield site
        site.client.close()


class Agent:
    """A conversation by OpenAI's client."""

    def __init__(self, session: Session, url: str = "") -> None:
        self.client = openai.OpenAI(base_url=url or session.openai_url, api_key=session.key, max_retries=8)
        self.messages: list[Any] = []

    def ask(self, content: str | list[dict[str, Any]], **options: Any) -> str:
        self.messages.append({"role": "user", "content": content})
        reply = self.client.chat.completions.create(model="any", messages=self.messages, **options).choices[0].message
        self.messages.append(reply.model_dump(exclude_none=True))
        return reply.content or ""

    def at(self, url: str) -> Agent:
        """The same agent, whose calls go elsewhere from now on."""
        self.client = self.client.with_options(base_url=url)
        return self


def test_an_agent_with_tools_leaves_a_trajectory_like_any_other(site: Site) -> None:
    with site.client.session(policy="tiny", metadata={"user": "ada"}) as session:
        agent = Agent(session)
        agent.ask(f"[[reply:<tool_call>{_CALL}</tool_call>]][[reply2:Sunny.]]", tools=[_TOOL])
        [call] = agent.messages[-1]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"city": "Kyiv"}
        agent.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "21 degrees"})
        with agent.client.chat.completions.stream(model="any", messages=agent.messages, tools=[_TOOL]) as stream:
            assert stream.get_final_completion().choices[0].message.content == "Sunny."
        session.reward(0.5)
    ended = site.client.session_info(session.id)
    assert (ended["state"], ended["reward"], ended["trainable"], ended["turns"]) == ("succeeded", 0.5, True, 2)
    assert ended["fidelity"] == "token-exact"
    assert ended["last_call_at"] is not None
    trajectory = site.client.trajectory(session.id)
    assert [message["role"] for message in trajectory["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert [(tool["name"], tool["output"]) for tool in trajectory["tool_calls"]] == [("weather", "21 degrees")]
    [result] = [result for result in site.client.iter_results(ended["run"]) if result["id"] == session.id]
    assert result["rewards"] == {"reward": 0.5}


def test_claude_clients_are_served_too(site: Site) -> None:
    with site.client.session(policy="tiny") as session:
        client = anthropic.Anthropic(base_url=session.anthropic_url, api_key=session.key)
        options: Any = {"model": "any", "max_tokens": 100}
        messages: Any = [{"role": "user", "content": "[[reply:Hello.]][[reply2:Bye.]]"}]
        first = client.messages.create(messages=messages, **options)
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": "And now?"}]
        with client.messages.stream(messages=messages, **options) as stream:
            assert stream.get_final_text() == "Bye."
    calls = site.calls(session)
    assert [(call["segment"], call["text"]) for call in calls] == [(0, "Hello."), (0, "Bye.")]


def test_calls_go_on_after_the_gateway_was_killed(site: Site) -> None:
    with site.client.session(policy="tiny") as session:
        agent = Agent(session)
        agent.ask("Hello.")
        site.platform.kill("gateway")
        site.start_gateway()
        agent.ask("Still there?")
        assert [(call["turn"], call["segment"]) for call in site.calls(session)] == [(0, 0), (1, 0)]
    assert site.client.session_info(session.id)["fidelity"] == "token-exact"


def test_pictures_are_gone_on_from_after_the_gateway_was_killed(site: Site, seeing_model: str) -> None:
    site.platform.manage("shell", "--no-imports", "-c", _REGISTER.format(url=seeing_model))
    first, second = png(40, 30, (255, 0, 0)), png(20, 60, (0, 0, 255))
    with site.client.session(policy="sees") as session:
        agent = Agent(session)
        agent.ask([{"type": "text", "text": "[[reply:Red.]]"}, {"type": "image_url", "image_url": {"url": data_url(first)}}])
        site.platform.kill("gateway")
        site.start_gateway()
        agent.ask([{"type": "image_url", "image_url": {"url": data_url(second)}}])
        calls = site.calls(session)
    assert [call["segment"] for call in calls] == [0, 0]
    assert [[digest for _, _, digest in call["placed"]] for call in calls] == [[first.digest], [second.digest]]
    assert site.client.session_info(session.id)["fidelity"] == "token-exact"
    assert site.client.picture(session.id, second.digest) == second.data


def test_two_gateways_serve_one_session_in_turn(site: Site) -> None:
    url = site.start_gateway("second")
    with site.client.session(policy="tiny") as session:
        agent = Agent(session)
        for n in range(4):
            agent.at(url if n % 2 else session.openai_url).ask(f"Message {n}.")
        assert [(call["turn"], call["segment"]) for call in site.calls(session)] == [(n, 0) for n in range(4)]


def test_calls_at_the_same_time_do_not_disturb_each_other(site: Site) -> None:
    with site.client.session(policy="tiny") as session, ThreadPoolExecutor(8) as threads:
        agents = [Agent(session) for _ in range(8)]
        for agent in agents:
            agent.client = agent.client.with_options(max_retries=0)
        for turn in range(3):
            list(threads.map(lambda agent, turn=turn: agent.ask(f"{turn} of {id(agent)}"), agents))
        assert [call["turn"] for call in site.calls(session)] == list(range(24))
        assert {call["segment"] for call in site.calls(session)} == set(range(8))


def test_calls_at_the_same_time_at_two_gateways_are_all_recorded(site: Site) -> None:
    url = site.start_gateway("second")
    with site.client.session(policy="tiny") as session, ThreadPoolExecutor(6) as threads:
        agents = [Agent(session, url if n % 2 else "") for n in range(6)]
        replies = list(threads.map(lambda agent: agent.ask(f"I am {id(agent)}. [[delay:0.3]]"), agents))
    assert all(replies)
    calls = site.calls(session)
    assert [call["turn"] for call in calls] == list(range(len(calls)))
    assert {reply.strip() for reply in replies} <= {call["text"].strip() for call in calls}


def test_a_gateway_that_stops_gives_its_sessions_away(site: Site) -> None:
    url = site.start_gateway("second")
    with site.client.session(policy="tiny") as session:
        agent = Agent(session, url)
        agent.ask("Hello.")
        site.platform.terminate("second")
        agent.at(session.openai_url).ask("Still there?")
        assert [(call["turn"], call["segment"]) for call in site.calls(session)] == [(0, 0), (1, 0)]


def test_an_agent_that_falls_silent_is_given_up(site: Site) -> None:
    opened = site.client.session(policy="tiny", ttl_seconds=5)
    with pytest.raises(openai.PermissionDeniedError, match="agent_lost"), opened as session:
        agent = Agent(session)
        agent.ask("Hello.")
        session._over.set()  # no heartbeat any more
        ended = site.wait_for(session, "failed")
        assert (ended["termination"]["cause"], ended["reward"]) == ("agent_lost", None)
        agent.ask("Too late.")


def test_a_heartbeat_is_enough_to_stay(site: Site) -> None:
    with site.client.session(policy="tiny", ttl_seconds=15) as session:
        begun = site.client.session_info(session.id)["expires_at"]
        site.platform.wait_for(lambda: site.client.session_info(session.id)["expires_at"] > begun, "a heartbeat")
        assert site.client.session_info(session.id)["open"]


def test_a_cancelled_session_takes_no_calls(site: Site) -> None:
    with pytest.raises(openai.PermissionDeniedError, match="cancel"), site.client.session(policy="tiny") as session:
        agent = Agent(session)
        agent.ask("Hello.")
        site.client.cancel_rollout(session.id)
        ended = site.wait_for(session, "cancelled")
        assert ended["termination"]["cause"] == "cancelled"
        agent.ask("Too late.")


def test_a_spent_budget_ends_its_sessions(site: Site) -> None:
    run = site.client.create_run("small", "tiny", limits={"max_tokens": 1}, settings={"on_budget": "cancel"})
    with pytest.raises(openai.PermissionDeniedError), site.client.session(run=run["id"]) as session:
        agent = Agent(session)
        agent.ask("Hello.")
        ended = site.wait_for(session, "cancelled")
        assert ended["termination"]["cause"] == "budget_exhausted"
        agent.ask("Too late.")


def test_an_unknown_key_is_refused(site: Site) -> None:
    with site.client.session(policy="tiny") as session:
        stranger = openai.OpenAI(base_url=session.openai_url, api_key=f"{session.key}x")
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        assert [model.id for model in Agent(session).client.models.list()] == ["tiny"]


def test_without_a_reward_the_environment_scores_the_last_reply(site: Site) -> None:
    run = site.platform.value("SELECT id FROM rollouts_run WHERE name = 'run'")
    task = site.platform.value("SELECT task_id FROM rollouts_rollout WHERE run_id = %s LIMIT 1", run)
    site.platform.start_worker("eval")
    with site.client.session(policy="tiny", task={"task_id": str(task)}) as session:
        Agent(session).ask("What is 1 + 1? [[reply:It is 2]]")
    ended = site.wait_for(session, "succeeded")
    assert (ended["reward"], ended["environment"]) == (1.0, "sums")


def test_an_agent_that_raised_has_failed(site: Site) -> None:
    with pytest.raises(ZeroDivisionError), site.client.session(policy="tiny") as session:
        raise ZeroDivisionError("by nought")
    ended = site.client.session_info(session.id)
    assert ended["termination"] == {
        "phase": "run",
        "cause": "agent_failed",
        "blame": "caller",
        "detail": "ZeroDivisionError: by nought",
    }


def test_keys_are_in_no_log(site: Site) -> None:
    with site.client.session(policy="tiny") as session:
        Agent(session).ask("Hello.")
        secret = session.key.rpartition("_")[2]
    for log in site.platform._log_files():
        assert secret not in log.read_text(errors="replace")


def test_a_gateway_that_drains_lets_its_calls_end(site: Site, quick_model: str) -> None:
    url = site.start_gateway("second")
    with site.client.session(policy="tiny") as session, ThreadPoolExecutor(1) as threads:
        agent = Agent(session, url)
        agent.ask("Hello.")
        reply = threads.submit(agent.ask, "Slowly. [[delay:2]][[reply2:Done.]]")
        site.platform.wait_for(lambda: _RUNNING.search(httpx.get(f"{quick_model}/metrics").text), "the call to be in flight")
        process = site.platform.processes["second"]
        process.send_signal(signal.SIGUSR1)
        assert reply.result() == "Done."
        assert process.wait(20) == 0
        assert len(site.calls(session)) == 2


def test_all_that_was_recorded_is_what_was_sent_and_sampled(site: Site) -> None:
    assert " 0 wrong" in site.platform.manage("check_tokens", "--all")
