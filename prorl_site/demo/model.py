"""The demo's model: a server that is running already, a real vLLM on the CPU, or, said loudly, the scripted model."""

from __future__ import annotations

import os
import sys

from prorl_site import env
from prorl_site.embedded.processes import free_port, http_answers
from prorl_site.embedded.supervisor import Service, ServiceFailed, Supervisor
from prorl_site.embedded.vllm import VllmHome, VllmServer, VllmUnavailable
from prorl_site.local import LLM_STOPS, Say

_RULE = "*" * 78


def start_model(supervisor: Supervisor, say: Say) -> str:
    """The URL of a model server, started if need be."""
    if url := os.environ.get("PRORL_LLM_URL"):
        say(f"using the model server at {url}")
        return url
    home = VllmHome(env.var_dir().parent)
    try:
        server = VllmServer(home, home.prepare(say))
        say("starting vLLM (half a minute on two cores)")
        supervisor.start(server.service())
        return server.url
    except (VllmUnavailable, ServiceFailed) as reason:
        say(_RULE)
        say(f"NO REAL MODEL: vLLM cannot run here: {reason}")
        say("The demo goes on with the SCRIPTED model, which only pretends to think. Set PRORL_LLM_URL to use a real one.")
        say(_RULE)
        return _start_scripted(supervisor)


def _start_scripted(supervisor: Supervisor) -> str:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "rollouts.llm.scripted", "--port", str(port), "--delay", "0.05"]
    supervisor.start(
        Service(
            name="scripted-model",
            command=command,
            ready=lambda: http_answers(f"{url}/health"),
            stop_order=LLM_STOPS,
        )
    )
    return url
