"""The whole way with a real vLLM (a tiny random model): what is stored is what was sampled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import httpx
import pytest

from rollouts.client import Client
from tests.acceptance.platform import Platform, running_platform

ISSUE_KEY = """
import json
from rollouts.models import Project
from rollouts.services.keys import issue_key
print(json.dumps(issue_key(project=Project.objects.create(name="alpha"), name="test", scopes=["admin"]).secret))
"""


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    """On the broker made of files: one platform of this suite should live as `prorl up` does."""
    with running_platform(tmp_path_factory.mktemp("vllm") / "var") as running:
        running.start_execution()
        yield running


def test_rollouts_through_the_public_api_are_token_exact(platform: Platform, vllm_url: str):
    url = platform.start_web()
    with Client(url, platform.shell(ISSUE_KEY)) as client:
        server = client.register_server(vllm_url, policy="tiny")
        client.create_environment("sums", handler="arithmetic")
        client.create_environment("problems", handler="math", config={"max_turns": 2})
        run = client.create_run("real", policy="tiny", settings={"sampling": {"max_tokens": 24}})
        client.submit_groups(
            run["id"],
            [
                {"n": 4, "environment": "sums", "payload": {"a": 2, "b": 3}},
                {"n": 2, "environment": "problems", "payload": {"question": "What is 6 * 7?", "expected_answer": "42"}},
            ],
        )
        results = list(client.iter_results(run["id"], include="trajectory"))
    assert len(results) == 6
    for rollout in results:
        assert (rollout["state"], rollout["fidelity"]) == ("succeeded", "token-exact")
        assert rollout["reward"] in (0.0, 1.0)
        for call in rollout["trajectory"]["model_calls"]:
            assert call["server"] == server["id"]
            assert decoded(vllm_url, call["sampled_ids"]) == call["text"]
        (segment,) = rollout["trajectory"]["segments"]
        check_against_a_recomputation(vllm_url, segment["token_ids"], segment["loss_mask"], segment["logprobs"])


def decoded(vllm_url: str, ids: list[int]) -> str:
    """What vLLM's own tokenizer makes of the ids, without special tokens (as it left them out of the text)."""
    text = httpx.post(f"{vllm_url}/detokenize", json={"model": "tiny-llama", "tokens": ids}).json()["prompt"]
    for special in ("<|im_end|>", "<|im_start|>", "<|endoftext|>"):
        text = text.replace(special, "")
    return str(text)


def check_against_a_recomputation(vllm_url: str, ids: list[int], mask: list[int], logprobs: list[float] | None) -> None:
    """vLLM scores the stored sequence as a prompt: at every sampled position it finds the probability that was stored."""
    body = {"model": "tiny-llama", "prompt": ids, "max_tokens": 1, "prompt_logprobs": 0}
    scored = httpx.post(f"{vllm_url}/v1/completions", json=body, timeout=60).json()["choices"][0]["prompt_logprobs"]
    assert logprobs is not None
    assert sum(mask) > 0
    for token, sampled, stored, entry in itertools.zip_longest(ids, mask, logprobs, scored):
        if sampled:
            assert math.isclose(entry[str(token)]["logprob"], stored, abs_tol=1e-3)
