"""Whatever the model says and the tools answer: sampled ids are sent back as they were sampled.

Two tokenizers: the scripted one, and a byte-pair encoding trained here whose samples leave merges out. In both, text re-merges
when it is encoded again.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollouts.lifecycle import Fidelity
from rollouts.llm.buffer import reconstruct, validate
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.script import Request
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.scripted.template import chatml
from rollouts.llm.scripted.tokenizer import ScriptedTokenizer, Tokenizer
from rollouts.llm.types import ChatMessage, Sampling

SPECIALS = ("<|im_start|>", "<|im_end|>")
CORPUS = "the other number is there and another one is the answer to the other question, then and there, rather than another"
MERGES = 40


class BytePairTokenizer:
    """A byte-pair encoding with trained merges. `sample` forgets some merges, so that its ids are not canonical."""

    def __init__(self) -> None:
        self._texts = [bytes([value]) for value in range(256)]
        self._ranks: dict[tuple[int, int], int] = {}
        ids = list(CORPUS.encode())
        for _ in range(MERGES):
            pair = Counter(itertools.pairwise(ids)).most_common(1)[0][0]
            self._ranks[pair] = len(self._texts)
            self._texts.append(self._texts[pair[0]] + self._texts[pair[1]])
            ids = self._merge(ids, pair)
        self._specials = {text: len(self._texts) + number for number, text in enumerate(SPECIALS)}
        self._texts += [text.encode() for text in SPECIALS]
        self.size = len(self._texts)
        self.end_of_turn = self._specials["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, SPECIALS)) + ")", text):
            ids += [self._specials[part]] if part in self._specials else self._apply(part, self._ranks)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool) -> str:
        kept = (i for i in ids if not (skip_special and i in self._specials.values()))
        return b"".join(self._texts[i] for i in kept).decode("utf-8", "replace")

    def sample(self, text: str, rng: random.Random) -> list[int]:
        return self._apply(text, [pair for pair in self._ranks if rng.random() < 0.7])

    def _apply(self, text: str, merges: Sequence[tuple[int, int]] | dict[tuple[int, int], int]) -> list[int]:
        ids = list(text.encode())
        for pair in merges:
            ids = self._merge(ids, pair)
        return ids

    def _merge(self, ids: list[int], pair: tuple[int, int]) -> list[int]:
        merged, position = [], 0
        while position < len(ids):
            if tuple(ids[position : position + 2]) == pair:
                merged.append(self._ranks[pair])
                position += 2
            else:
                merged.append(ids[position])
                position += 1
        return merged


class Stage:
    """A loop with a client and a server whose replies a test sets; shared by all examples of a test."""

    def __init__(self, runner: asyncio.Runner, client: ModelClient, server: ScriptedServer, tokenizer: Tokenizer) -> None:
        self.runner, self.client, self.server, self.tokenizer = runner, client, server, tokenizer
        self.replies: list[str] = []

    def reply(self, request: Request) -> str:
        return self.replies[request.turn - 1]


@pytest.fixture(params=[ScriptedTokenizer, BytePairTokenizer], scope="module")
def stage(request: pytest.FixtureRequest) -> Iterator[Stage]:
    @asynccontextmanager
    async def running(tokenizer: Tokenizer) -> AsyncIterator[tuple[ModelClient, ScriptedServer]]:
        client = ModelClient()
        async with ScriptedServer(tokenizer=tokenizer, script=lambda asked: stage.reply(asked)) as server:
            yield client, server
            await client.close()

    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        tokenizer = request.param()
        client, server = runner.run(stack.enter_async_context(running(tokenizer)))
        stage = Stage(runner, client, server, tokenizer)
        yield stage
        runner.run(stack.aclose())


# Text made of what the tokenizers merge, with line breaks and spaces at its edges, and anything else that can be encoded.
MERGING = st.lists(
    st.sampled_from(["th", "e", " ", "the", "re", "\n", "an", "other", "número", "1", "2", "```"]), min_size=1, max_size=8
)
TEXT = MERGING.map("".join) | st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
ROUND = st.tuples(TEXT, st.lists(st.tuples(st.sampled_from(["user", "tool"]), TEXT), min_size=1, max_size=3))


@given(question=TEXT, rounds=st.lists(ROUND, min_size=1, max_size=4), last=TEXT)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prompts_carry_the_sampled_ids_and_read_as_the_template_writes_them(stage, question, rounds, last):
    async def play() -> None:
        address = stage.server.address()
        conversation = Conversation(stage.client, FixedRoute(address), Sampling(), call_timeout=20)
        conversation.append({"role": "user", "content": question})
        calls = []
        for turn, (_, messages) in enumerate([*rounds, (last, [])]):
            calls.append(await conversation.sample(turn))
            conversation.append(*(ChatMessage(role=role, content=content) for role, content in messages))
        validate(calls)
        assert conversation.fidelity is Fidelity.TOKEN_EXACT
        exchanges = reconstruct(calls)
        for call, exchange, (text, _) in zip(calls, exchanges, [*rounds, (last, [])], strict=True):
            assert call.text == text
            assert stage.tokenizer.decode(exchange.sampled_ids, skip_special=False) == text + "<|im_end|>"
        final = exchanges[-1].prompt_ids
        position = 0
        for exchange in exchanges[:-1]:
            position = len(exchange.prompt_ids)
            assert final[position : position + len(exchange.sampled_ids)] == exchange.sampled_ids
        assert stage.tokenizer.decode(final, skip_special=False) == chatml(conversation.messages[:-1], True)

    stage.replies = [text for text, _ in rounds] + [last]
    stage.runner.run(play())


def test_these_tokenizers_would_show_a_client_that_encodes_again(stage):
    text = "the other number is there and another one"
    sampled = stage.tokenizer.sample(text, random.Random(1))  # noqa: S311
    assert stage.tokenizer.decode(sampled, skip_special=False) == text
    assert sampled != stage.tokenizer.encode(text)
