"""Ten thousand random conversations: what is stored is what was sent and sampled, id by id.

Real tokenizers of three kinds, trained here on text that re-merges, and templates in the style of six families of models.
Servers fail, abort, lose answers and take over from each other; replies are cut, reason, call tools, end at stop strings. The
oracle is the servers' own log of the ids they were sent and gave back: it shares no code with what it judges. Some
conversations have pictures, which the servers expand to ids.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import random
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pytest
from tokenizers import Tokenizer

from rollouts.lifecycle import Fidelity
from rollouts.llm.buffer import TokenBuffer, reconstruct, validate
from rollouts.llm.capabilities import Feature
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.errors import ModelError
from rollouts.llm.messages import pictures_in
from rollouts.llm.route import CallCut
from rollouts.llm.sampler import sample
from rollouts.llm.transport import Transport
from rollouts.llm.types import NOTHING, ChatMessage, ModelCallRecord, Sampling, ServerAddress, TokenPrompt
from sandboxes.protocol import Picture
from tests.unit.chat_templates import FRAGMENTS, FRAME, KINDS, PICTURE, STYLES, PlainRenderer, Style, train, write_files

CONVERSATIONS = 10_000
STOP = "STOP"
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "the other", "parameters": {"type": "object"}}}
    for name in ("search", "run")
]


class Served(NamedTuple):
    """A generation request as a server saw it. `kept` says that the client got the answer and may go on from it."""

    prompt: list[int]
    pictures: list[str]  # SHA-256
    ids: list[int]
    logprobs: list[float | None]
    kept: bool
    ended: bool


class Asked(NamedTuple):
    """What an agent wanted sent: `messages`, of which the first `seen` end in the reply that it goes on from."""

    messages: list[ChatMessage]
    seen: int
    tools: Any


class Servers(Transport):
    """Two model servers without HTTP: a tokenizer, a template, random replies, and a log."""

    def __init__(self, tokenizer: Tokenizer, renderer: PlainRenderer, style: Style) -> None:
        super().__init__()
        self.log: list[Served] = []
        self.rng = random.Random()  # noqa: S311
        self.lossy = 0.0  # how often a request goes wrong
        self.in_a_row = 0
        self._tokenizer, self._renderer, self._style = tokenizer, renderer, style
        self._end_of_turn, self._frame_id = tokenizer.token_to_id(style.end_of_turn), tokenizer.token_to_id(FRAME)
        self.picture_id: int = tokenizer.token_to_id(PICTURE)
        # Ids that spell text in other ways than the tokenizer would, as models sample them.
        self._pieces = [ids for text in FRAGMENTS if (ids := self._encode(text))]

    async def request(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, api_key: str = "", timeout: float
    ) -> dict[str, Any]:
        assert body is not None
        if url.endswith("/tokenize"):
            return {"tokens": self._tokenize(body)}
        if url.endswith("/render"):
            return self._render(body)
        if url.endswith("/detokenize"):
            return {"prompt": self._tokenizer.decode(body["tokens"], skip_special_tokens=False)}
        if url.endswith("/inference/v1/generate"):
            return self._generate(body)
        assert url.endswith("/v1/completions")
        choice, logprobs = self._sample(body["prompt"], [], body)
        return {"choices": [choice | {"logprobs": {"token_logprobs": logprobs}}]}

    def expanded(self, ids: Sequence[int], pictures: Sequence[bytes]) -> list[int]:
        """With what the model gets for each picture in place of its one id."""
        given, left = [], list(pictures)
        for token in ids:
            given += self.shown(left.pop(0)) if token == self.picture_id and left else [token]
        assert not left
        return given

    def shown(self, picture: bytes) -> list[int]:
        return [self._frame_id, *[self.picture_id] * (1 + sum(picture) % 5), self._frame_id]

    def _render(self, body: Mapping[str, Any]) -> dict[str, Any]:
        parts = [part for message in body["messages"] if isinstance(message["content"], list) for part in message["content"]]
        pictures = [_data(part["image_url"]["url"]) for part in parts if part["type"] == "image_url"]
        ids, places = self.expanded(self._tokenize(body), pictures), []
        starts = [at for at, token in enumerate(ids) if token == self._frame_id][::2]
        for start, picture in zip(starts, pictures, strict=True):
            places.append({"offset": start, "length": len(self.shown(picture))})
        return {"token_ids": ids, "features": {"mm_placeholders": {"image": places}}}

    def _generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        pictures = [_data(part["url"]) for part in body.get("content_parts", ())]
        prompt = self.expanded(body["token_ids"], pictures)
        choice, logprobs = self._sample(prompt, pictures, body["sampling_params"])
        choice["logprobs"] = {"content": [{"logprob": value} for value in logprobs]}
        return {"choices": [choice], "prompt_token_ids": prompt}

    def _tokenize(self, body: Mapping[str, Any]) -> list[int]:
        try:
            return self._renderer.ids(body["messages"], body["add_generation_prompt"], body.get("tools"))
        except jinja2.TemplateError as error:
            raise ModelError(str(error), retryable=False, status=400) from error

    def _sample(
        self, prompt: Sequence[int], pictures: Sequence[bytes], asked: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[float | None]]:
        rng = self.rng
        ids = self._reply_ids()
        reason = "stop"
        if asked.get("stop") and rng.random() < 0.3:
            ids += self._encode(STOP)
        elif rng.random() < 0.1:
            reason = "length"
        else:
            ids.append(self._end_of_turn)
        if len(ids) > asked["max_tokens"]:
            ids, reason = ids[: asked["max_tokens"]], "length"
        logprobs: list[float | None] = [-rng.random() for _ in ids]
        fault = rng.choice(["refused", "lost", "nan", "abort"]) if rng.random() < self.lossy and self.in_a_row < 2 else ""
        self.in_a_row = self.in_a_row + 1 if fault else 0
        if fault == "refused":
            raise ModelError("no", retryable=True, status=503)
        if fault == "abort" and len(ids) > 1:  # a reply that has ended is not aborted
            cut = rng.randrange(1, len(ids))
            ids, logprobs, reason = ids[:cut], logprobs[:cut], "abort"
        elif rng.random() < 0.05:
            logprobs[rng.randrange(len(ids))] = None
        digests = [hashlib.sha256(picture).hexdigest() for picture in pictures]
        self.log.append(Served(list(prompt), digests, ids, logprobs, fault in ("", "abort"), reason != "abort"))
        if fault == "lost":
            raise ModelError("the connection broke", retryable=True)
        if fault == "nan":
            logprobs = [float("nan"), *logprobs[1:]]
        return {"text": self._tokenizer.decode(ids), "finish_reason": reason, "token_ids": ids}, logprobs

    def _reply_ids(self) -> list[int]:
        ids = [token for piece in self.rng.choices(self._pieces, k=self.rng.randint(1, 8)) for token in piece]
        if self.rng.random() < 0.3:
            ids = self._encode("<think>\n") + ids + self._encode("\n</think>\n\n") + self.rng.choice(self._pieces)
        return ids

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids


class Route:
    """Two servers of different weights; a call that fails moves to the other one, and weight updates cut some."""

    only_version = None

    def __init__(self, servers: Sequence[ServerAddress], rng: random.Random, lossy: float) -> None:
        self._servers, self._rng, self._lossy = list(servers), rng, lossy

    @property
    def server(self) -> ServerAddress:
        return self._servers[0]

    @contextlib.asynccontextmanager
    async def call(self) -> AsyncIterator[ServerAddress]:
        if self._rng.random() < self._lossy / 4:
            raise CallCut
        try:
            yield self._servers[0]
        except ModelError:
            self._servers.reverse()
            raise


@dataclass
class Branch:
    """One of an agent's conversations: what it has seen, and where its tokens are."""

    messages: list[ChatMessage] = field(default_factory=list)
    seen: int = 0
    segment: int | None = None
    last_id: int | None = None


class Agent:
    """An agent with tools and sub-agents, as the gateway serves them: it goes on in any of its branches."""

    def __init__(self, client: ModelClient, route: Route, sampling: Sampling, style: Style) -> None:
        self._client, self._route, self._sampling = client, route, sampling
        self._tools = TOOLS if style.tools else None
        self._buffer = TokenBuffer()
        self.calls: list[ModelCallRecord] = []
        self.asked: list[Asked] = []

    async def step(self, branch: Branch) -> ModelCallRecord:
        server, turns = self._route.server, self._client.turns
        history, new = branch.messages[: branch.seen], branch.messages[branch.seen :]
        context = None
        if branch.last_id is not None:
            context = await turns.continuation(server, branch.last_id, history, new, tools=self._tools)
        opens = context is None
        if context is None:
            context = await self._client.render(server, branch.messages, add_generation_prompt=True, tools=self._tools)
            branch.segment = len(self._buffer.segments)
        assert branch.segment is not None
        segment = NOTHING if opens else self._buffer.segments[branch.segment]
        prompt = TokenPrompt(segment.ids, tuple(segment.placed)).followed_by(context)
        pictures = pictures_in(branch.messages)
        done, server, spans = await sample(self._client, self._route, prompt, self._sampling, timeout=20, pictures=pictures)
        call = ModelCallRecord(
            turn=len(self.calls),
            segment=branch.segment,
            context_ids=context.ids,
            placed=context.placed,
            sampled_ids=done.token_ids,
            logprobs=done.logprobs,
            text=done.text,
            finish_reason=done.finish_reason,
            prompt_tokens=len(prompt.ids),
            policy="p",
            policy_version=spans[0].version,
            server_id="",
            latency=0.0,
            policy_version_last=spans[-1].version,
            version_spans=spans,
            opened_by="start" if opens else "",
        )
        self._buffer.add(call)
        self.calls.append(call)
        self.asked.append(Asked(list(branch.messages), branch.seen, self._tools))
        branch.last_id = done.token_ids[-1]
        return call


@dataclass
class World:
    """One kind of tokenizer with one style of template."""

    servers: Servers
    renderer: PlainRenderer
    tokenizer: Tokenizer
    style: Style
    exact: bool  # whether ids decode to the very text that was rendered
    addresses: tuple[ServerAddress, ServerAddress]  # rendered by the server, rendered here
    sees: bool = False

    def opening(self, rng: random.Random) -> list[ChatMessage]:
        return [self._illustrated(rng, message) for message in opening(rng, self.style)]

    def next_messages(self, rng: random.Random, calls: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
        return [self._illustrated(rng, message) for message in next_messages(rng, self.style, calls)]

    def text(self, messages: Sequence[ChatMessage], prompt: bool, tools: Any = None) -> str:
        """As the template writes it, with one mark for each picture."""
        return self.renderer.text([_written(message) for message in messages], prompt, tools)

    def ids(self, text: str, messages: Sequence[ChatMessage]) -> list[int]:
        """Of a text which the pictures of these messages are in."""
        parts = [part for message in messages for part in message.get("parts", ())]
        pictures = [part["picture"].data for part in parts if part["type"] == "picture"]
        return self.servers.expanded(self.tokenizer.encode(text, add_special_tokens=False).ids, pictures)

    def _illustrated(self, rng: random.Random, message: ChatMessage) -> ChatMessage:
        if not self.sees or message["role"] not in ("user", "tool") or rng.random() < 0.5:
            return message
        pictures = [Picture("image/png", rng.choice([b"cat", b"dog", b"owls"])) for _ in range(rng.randint(1, 3))]
        parts: list[dict[str, Any]] = [{"type": "picture", "picture": picture} for picture in pictures]
        parts.insert(rng.randint(0, len(parts)), {"type": "text", "text": message["content"]})
        return {**message, "parts": parts}


def make_world(kind: str, name: str, directory: Path) -> World:
    tokenizer, style = train(kind), STYLES[name]
    renderer = PlainRenderer(style.source, tokenizer)
    here = str(write_files(directory / f"{kind}-{name}", tokenizer, style.source))
    addresses = tuple(ServerAddress("http://a", "m", "p", 1, 100_000, tokenizer=where) for where in ("", here))
    servers = Servers(tokenizer, renderer, style)
    return World(servers, renderer, tokenizer, style, style.exact and kind == "byte_pairs", addresses)  # type: ignore[arg-type]


def text(rng: random.Random, most: int = 6) -> str:
    return "".join(rng.choices(FRAGMENTS, k=rng.randint(0, most)))


def next_messages(rng: random.Random, style: Style, calls: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    """What comes after a reply: the results of its calls, questions, a system message in the middle."""
    if calls:
        results = [ChatMessage(role="tool", content=text(rng), tool_call_id=call["id"]) for call in calls]
        return [
            *results,
            *([ChatMessage(role="user", content=text(rng))] if rng.random() < 0.2 and not style.alternates else []),
        ]
    if style.alternates:
        return [{"role": "user", "content": text(rng)}]
    roles = [role for role in ("tool", "user", "system") if role in style.roles]
    return [ChatMessage(role=rng.choice(roles), content=text(rng)) for _ in range(rng.randint(1, 3))]


def opening(rng: random.Random, style: Style) -> list[ChatMessage]:
    system: list[ChatMessage] = (
        [{"role": "system", "content": text(rng)}] if rng.random() < 0.5 and "system" in style.roles else []
    )
    return [*system, {"role": "user", "content": text(rng)}]


def some_calls(rng: random.Random, name: str) -> list[dict[str, Any]]:
    """Calls that a reply made, as its message tells them."""
    count = 0 if name in ("chatml", "parts", "gemma") else rng.choice([0, 1, 1, 2] if name != "llama3" else [0, 1])
    return [
        {
            "id": f"call{rng.randrange(100_000):05}",
            "type": "function",
            "function": {"name": "run", "arguments": {"a": text(rng)}},
        }
        for _ in range(count)
    ]


async def converse(
    world: World, client: ModelClient, route: Route, sampling: Sampling, rng: random.Random
) -> tuple[list[ModelCallRecord], list[Asked]]:
    """Through the shipped agent's conversation."""
    conversation = Conversation(client, route, sampling, call_timeout=20)
    conversation.append(*world.opening(rng))
    calls, asked = [], []
    for turn in range(rng.randint(1, 5)):
        seen = len(conversation.messages) if turn else 0
        if turn:
            conversation.append(*world.next_messages(rng, ()))
        asked.append(Asked(list(conversation.messages), seen, None))
        calls.append(await conversation.sample(turn))
    assert conversation.fidelity == validate(calls).fidelity
    if world.exact and conversation.fidelity is Fidelity.TOKEN_EXACT:
        prompt = world.tokenizer.decode(reconstruct(calls)[-1].prompt_ids, skip_special_tokens=False)
        marked = re.sub(f"{re.escape(FRAME)}({re.escape(PICTURE)})+{re.escape(FRAME)}", PICTURE, prompt)
        assert marked == world.text(conversation.messages[:-1], True)
    return calls, asked


async def branch_out(
    world: World, client: ModelClient, route: Route, sampling: Sampling, rng: random.Random, name: str
) -> tuple[list[ModelCallRecord], list[Asked]]:
    """Through an agent that calls tools, forks, and works in several branches at a time."""
    agent = Agent(client, route, sampling, world.style)
    branches = [Branch(world.opening(rng))]
    for _ in range(rng.randint(1, 6)):
        if rng.random() < 0.2:  # a sub-agent, or a fork that has forgotten how its beginning was encoded
            branches.append(Branch(rng.choice([world.opening(rng), list(branches[0].messages)])))
        branch = rng.choice(branches)
        if branch.seen == len(branch.messages):
            calls = branch.messages[-1].get("tool_calls", ())
            branch.messages += world.next_messages(rng, calls)
        elif branch.messages[-1]["role"] == "assistant":
            branch.messages += world.next_messages(rng, branch.messages[-1].get("tool_calls", ()))
        call = await agent.step(branch)
        reply = ChatMessage(role="assistant", content=re.sub(r"^.*</think>\s*", "", call.text, flags=re.DOTALL))
        if "</think>" in call.text:
            reply["reasoning_content"] = "the"
        if calls := some_calls(rng, name):
            reply["tool_calls"] = calls
        branch.messages.append(reply)
        branch.seen = len(branch.messages)
    return agent.calls, agent.asked


def judge(log: Sequence[Served], calls: Sequence[ModelCallRecord]) -> None:
    """Compare what is stored with what the servers saw."""
    validate(calls)
    seen = iter(log)
    ends: dict[int, list[int]] = {}
    shown: dict[int, list[str]] = {}
    for call, exchange in zip(calls, reconstruct(calls), strict=True):
        served = next(seen)
        prompt, sampled, logprobs = served.prompt, [], []
        while True:
            assert served.prompt == prompt + sampled, "asked again for something else"
            if served.kept:
                sampled, logprobs = sampled + served.ids, logprobs + served.logprobs
                if served.ended or len(sampled) >= call.sampling.get("max_tokens", 64):
                    break
            served = next(seen)
        assert exchange.prompt_ids == prompt
        pictures = shown.setdefault(call.segment, [])
        pictures += [place.digest for place in call.placed]
        assert served.pictures == pictures
        assert exchange.sampled_ids == sampled
        assert call.logprobs == (None if None in logprobs else logprobs)
        before = ends.get(call.segment, [])
        assert prompt[: len(before)] == before, "what was sampled is not what is sent back"
        ends[call.segment] = prompt + sampled
    assert next(seen, None) is None, "a server saw a call that is not stored"


def judge_glue(world: World, calls: Sequence[ModelCallRecord], asked: Sequence[Asked]) -> None:
    """Where a segment goes on, the template, given the whole history, writes just that after the reply."""
    opened: set[int] = set()
    for call, (messages, seen, tools) in zip(calls, asked, strict=True):
        if call.segment not in opened:
            opened.add(call.segment)
            assert call.context_ids == world.ids(world.text(messages, True, tools), messages)
            continue
        before = world.text(messages[:seen], False, tools)
        before = before[: before.rindex(world.style.end_of_turn) + len(world.style.end_of_turn)]
        whole = world.text(messages, True, tools)
        assert whole.startswith(before), "the template has changed what was there"
        assert call.context_ids == world.ids(whole[len(before) :], messages[seen:])
        for place in call.placed:
            picture = pictures_in(messages)[place.digest]
            assert call.context_ids[place.offset : place.end] == world.servers.shown(picture.data)


def _written(message: ChatMessage) -> dict[str, Any]:
    return {**message, "content": message.get("parts", message["content"])}


def _data(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_random_conversations_do_not_drift(kind: str, name: str, tmp_path: Path) -> None:
    world = make_world(kind, name, tmp_path)
    badges: dict[Fidelity, int] = dict.fromkeys(Fidelity, 0)

    async def play(number: int) -> None:
        rng = world.servers.rng = random.Random(f"{kind} {name} {number}")  # noqa: S311
        world.servers.lossy = rng.choice([0.0, 0.0, 0.3])
        world.servers.log.clear()
        address = rng.choice(world.addresses)
        world.sees = rng.random() < 0.3
        if world.sees:
            address = replace(address, features=frozenset({Feature.GENERATE}), picture_id=world.servers.picture_id)
        other = replace(address, url="http://b", policy_version=2)
        sampling = Sampling(max_tokens=64, stop=rng.choice([(), (), (STOP,)]))
        route = Route([address, other], rng, world.servers.lossy)
        if rng.random() < 0.5:
            calls, asked = await converse(world, client, route, sampling, rng)
        else:
            calls, asked = await branch_out(world, client, route, sampling, rng, name)
        judge(world.servers.log, calls)
        judge_glue(world, calls, asked)
        badges[validate(calls).fidelity] += 1

    async def play_all() -> None:
        for number in range(-(-CONVERSATIONS // (len(STYLES) * len(KINDS)))):
            try:
                await play(number)
            except Exception as error:
                error.add_note(f"conversation {number}: {json.dumps(world.servers.log)[:2000]}")
                raise

    client = ModelClient(world.servers)
    asyncio.run(play_all())
    assert badges[Fidelity.TOKEN_EXACT] and badges[Fidelity.SEGMENTED]
    assert not badges[Fidelity.TEXT_ONLY]
