"""A real vLLM on this machine's CPU.

home = VllmHome(root)
model = home.prepare(say)            # minutes the first time, milliseconds after; raises VllmUnavailable
server = VllmServer(home, model)     # then server.service() for a Supervisor, or server.start()
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Self

import httpx

from prorl_site.embedded.processes import LeashedProcess, free_port, http_answers, wait_until
from prorl_site.embedded.supervisor import Service
from prorl_site.embedded.vllm_install import VllmHome, VllmUnavailable

START_SECONDS = 300.0  # 26 to 43 s were measured on two cores
FIRST_ANSWER_SECONDS = 30.0


class VllmServer:
    """One OpenAI-compatible server on 127.0.0.1, with vLLM's token-in/token-out and development (weight update) calls."""

    def __init__(
        self,
        home: VllmHome,
        model: Path,
        *,
        port: int | None = None,
        max_model_len: int = 4096,
        threads: int | None = None,
        cache_gib: int = 2,
    ) -> None:
        """`max_model_len` in tokens, prompt and answer together. A free port is taken unless `port` is given.

        `threads` compute; None: one for each processor, up to 8. `cache_gib` of memory keep what was computed of sequences.
        """
        self._home = home
        self._model = model
        self._threads = threads or min(os.cpu_count() or 1, 8)
        self._cache_gib = cache_gib
        self._port = port or free_port()
        self._max_model_len = max_model_len
        self._process: LeashedProcess | None = None

    @property
    def url(self) -> str:
        """Without `/v1`."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def model_name(self) -> str:
        return self._model.name

    def service(self) -> Service:
        """For a Supervisor. It holds no state, so it is simply killed at a stop."""
        return Service(
            name="vllm",
            command=self._command(),
            env=server_environment(self._home, self._threads, self._cache_gib),
            ready=self.is_ready,
            ready_seconds=START_SECONDS,
            stop_order=50,
            stop_signal=signal.SIGKILL,
        )

    def is_ready(self) -> bool:
        """Whether it generates. That it answers is not enough: what generating alone needs may be missing."""
        if not http_answers(f"{self.url}/health"):
            return False
        request = {"model": self.model_name, "prompt": [1], "max_tokens": 1, "logprobs": 1}
        try:
            answer = httpx.post(f"{self.url}/v1/completions", json=request, timeout=FIRST_ANSWER_SECONDS, trust_env=False)
        except httpx.HTTPError:
            return False
        return answer.is_success

    def start(self) -> str:
        """Starts it without a Supervisor; the URL, when it answers.

        Raises:
            VllmUnavailable: it ended or did not answer in time.
        """
        service = self.service()
        begun = time.monotonic()
        process = LeashedProcess(service.command, log=self._home.logs / f"vllm-{self._port}.log", env=service.env)
        self._process = process
        settled = wait_until(lambda: process.poll() is not None or self.is_ready(), timeout=START_SECONDS, interval=0.2)
        if not settled or process.poll() is not None:
            self.stop()
            seconds = time.monotonic() - begun
            raise VllmUnavailable(
                f"the server did not answer within {seconds:.0f} s (see {process.log}):\n{process.log_tail(3)}"
            )
        return self.url

    def stop(self) -> None:
        """Kills it and its engine processes."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _command(self) -> list[str | Path]:
        options = {
            "--served-model-name": self.model_name,
            "--host": "127.0.0.1",
            "--port": str(self._port),
            "--max-model-len": str(self._max_model_len),
            "--max-num-batched-tokens": str(max(8192, self._max_model_len)),  # chunked prefill crashed on CPU
            "--tool-call-parser": "hermes",
            "--logprobs-mode": "processed_logprobs",  # of the distribution sampled from: after temperature and top-p
        }
        switches = ["--enforce-eager", "--enable-scale-out", "--enable-auto-tool-choice"]  # eager: starts a minute sooner
        pairs = [word for option in options.items() for word in option]
        return [self._home.python, self._home.venv / "bin" / "vllm", "serve", self._model, *pairs, *switches]


def server_environment(home: VllmHome, threads: int, cache_gib: int) -> dict[str, str]:
    """What vLLM reads from its environment."""
    library_path = [str(home.libraries), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    return {
        "HF_HUB_OFFLINE": "1",
        "LD_LIBRARY_PATH": ":".join(library_path),
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",  # the sampler would be compiled at the first request, with a g++ that may not be there
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),  # the default is half of the memory
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /collective_rpc: how new weights are loaded
    }


__all__ = ["VllmHome", "VllmServer", "VllmUnavailable"]
