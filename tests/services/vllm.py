"""A real vLLM with a tiny random model, one for the whole test run."""

from __future__ import annotations

from pathlib import Path

from prorl_site.embedded.vllm import VllmHome, VllmServer

CLONE = Path(__file__).resolve().parents[2]


def start_tiny_vllm() -> VllmServer:
    """Install what is missing and start it. Raises `VllmUnavailable`."""
    home = VllmHome(CLONE)
    server = VllmServer(home, home.prepare_tiny(print), max_model_len=2048, adapters=True)
    server.start()
    return server
