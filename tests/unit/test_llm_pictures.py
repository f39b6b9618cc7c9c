"""Conversations with pictures: what is stored is what the model saw, id by id and picture by picture, or nothing is stored."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from rollouts.lifecycle import Fidelity
from rollouts.llm.buffer import TokenBuffer, reconstruct, validate
from rollouts.llm.capabilities import Feature
from rollouts.llm.client import ModelClient
from rollouts.llm.conversation import Conversation
from rollouts.llm.errors import ContextOverflow, ModelError
from rollouts.llm.messages import data_url, pictures_in
from rollouts.llm.picture_probe import MAX_TRIALS, find_picture_id
from rollouts.llm.pictures import picture_message
from rollouts.llm.placed import misplaced
from rollouts.llm.probe import probe
from rollouts.llm.route import FixedRoute
from rollouts.llm.sampler import sample
from rollouts.llm.scripted.script import Request
from rollouts.llm.scripted.sequences import Given, Place, fingerprint, logprob
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.scripted.template import chatml
from rollouts.llm.scripted.tokenizer import FRAME, PICTURE, ScriptedTokenizer
from rollouts.llm.segment_ids import SegmentIds
from rollouts.llm.transport import Transport
from rollouts.llm.types import ChatMessage, ModelCallRecord, Piece, PlacedPicture, Sampling, ServerAddress, TokenPrompt
from sandboxes.protocol import Picture
from tests.unit.test_llm_sampler import Way, post, until

PNG = b"\x89PNG\r\n\x1a\n"
CAT, DOG, OWL = (Picture("image/png", PNG + name) for name in (b"cat", b"dog", b"owl"))
DIGEST = CAT.digest


@pytest.fixture
async def client() -> AsyncIterator[ModelClient]:
    client = ModelClient()
    yield client
    await client.close()


def says_what_it_sees(request: Request) -> str:
    seen = [picture.removeprefix(PNG).decode("latin-1") for picture in request.pictures]
    return f"I see {' and '.join(seen) or 'nothing'}, in turn {request.turn}."


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(script=says_what_it_sees, pictures=True) as server:
        yield server


def seeing(server: ScriptedServer, version: int = 0) -> ServerAddress:
    return server.address(policy_version=version, features=(Feature.GENERATE,))


def talk(client: ModelClient, server: ScriptedServer, *first: ChatMessage) -> Conversation:
    conversation = Conversation(client, FixedRoute(seeing(server)), Sampling(), call_timeout=20)
    conversation.append(*first)
    return conversation


async def play(conversation: Conversation, *later: ChatMessage) -> list[ModelCallRecord]:
    """Sample, and once more after each of `later`."""
    calls = [await conversation.sample(0)]
    for turn, message in enumerate(later, start=1):
        conversation.append(message)
        calls.append(await conversation.sample(turn))
    return calls


def check(calls: Sequence[ModelCallRecord], pictures: Mapping[str, Picture]) -> None:
    """The stored logprobs are those of exactly these ids with these pictures at these places, and nothing else gives them."""
    segments = validate(calls).segments
    for call, exchange in zip(calls, reconstruct(calls), strict=True):
        placed = [place for place in segments[call.segment].placed if place.end <= len(exchange.prompt_ids)]
        places = tuple(Place(place.offset, place.length, pictures[place.digest].data) for place in placed)
        before = fingerprint(Given(exchange.prompt_ids, places).seen())
        assert call.logprobs is not None
        for token, value in zip(call.sampled_ids, call.logprobs, strict=True):
            assert value == logprob("", before, token)
            before = fingerprint([token], before)
    for segment in segments:
        assert not any(any(segment.mask[place.offset : place.end]) for place in segment.placed)


async def test_a_conversation_with_pictures_is_one_sequence(client, server):
    conversation = talk(client, server, picture_message("What is it?", CAT))
    calls = await play(
        conversation,
        picture_message("it shows", DOG, OWL, role="tool"),
        {"role": "user", "content": "and now?"},
        picture_message("", OWL),
    )
    assert conversation.fidelity is Fidelity.TOKEN_EXACT
    assert calls[-1].text == "I see cat and dog and owl and owl, in turn 4."
    assert [[place.digest for place in call.placed] for call in calls] == [
        [CAT.digest],
        [DOG.digest, OWL.digest],
        [],
        [OWL.digest],
    ]
    check(calls, pictures_in(conversation.messages))
    for earlier, later in itertools.pairwise(reconstruct(calls)):
        so_far = earlier.prompt_ids + earlier.sampled_ids
        assert later.prompt_ids[: len(so_far)] == so_far
    text = await client.detokenize(seeing(server), reconstruct(calls)[-1].prompt_ids)
    shown: list[ChatMessage] = [
        {**message, "content": message["content"] + PICTURE * len(pictures_in([message]))}
        for message in conversation.messages[:-1]
    ]
    assert re.sub(f"{FRAME}(?:{PICTURE})+{FRAME}", PICTURE, text) == chatml(shown, True)


async def test_pictures_that_touch_or_are_the_same_keep_their_places(client, server):
    conversation = talk(client, server, picture_message("", CAT, CAT, DOG, CAT))
    calls = await play(conversation, picture_message("", CAT))
    one, other, *_ = calls[0].placed
    assert one.end == other.offset
    assert [place.digest for place in calls[0].placed] == [CAT.digest, CAT.digest, DOG.digest, CAT.digest]
    check(calls, pictures_in(conversation.messages))


async def test_parts_between_pictures_stay_where_they_are(client, server):
    parts = [{"type": "picture", "picture": CAT}, {"type": "text", "text": " or "}, {"type": "picture", "picture": DOG}]
    rendered = await client.render(
        seeing(server), [{"role": "user", "content": " or ", "parts": parts}], add_generation_prompt=True
    )
    between = rendered.ids[rendered.placed[0].end : rendered.placed[1].offset]
    assert await client.detokenize(seeing(server), between) == " or "


async def test_a_reply_that_does_not_end_its_turn_is_followed_by_all_pictures_again(client, server):
    conversation = talk(client, server, picture_message("[[length1]]", CAT))
    calls = await play(conversation, picture_message("and this?", DOG))
    assert [call.opened_by for call in calls] == ["start", "cut"]
    assert [place.digest for place in calls[1].placed] == [CAT.digest, DOG.digest]
    check(calls, pictures_in(conversation.messages))


class Careless(ScriptedTokenizer):
    """Of a model that also samples the id that stands for a picture."""

    def sample(self, text: str, rng: random.Random) -> list[int]:
        return self.encode(text)


async def test_a_sampled_picture_id_is_not_taken_for_a_picture(client):
    """The server would expand it in place of the next picture."""
    tokenizer = Careless()
    async with ScriptedServer(script=lambda request: f"it is {PICTURE} there", tokenizer=tokenizer, pictures=True) as server:
        conversation = talk(client, server, picture_message("What is it?", CAT))
        calls = await play(conversation, {"role": "user", "content": "where?"}, picture_message("and this?", DOG))
        assert server.picture_id in calls[0].sampled_ids
        assert [(call.segment, call.opened_by) for call in calls] == [(0, "start"), (0, ""), (1, "template")]
        check(calls, pictures_in(conversation.messages))


async def test_a_picture_id_written_in_a_text_is_not_taken_for_the_next_picture(client, server):
    """All is rendered anew, where the server says itself which one it has taken."""
    conversation = talk(client, server, picture_message(f"Where is {PICTURE}?"))
    calls = await play(conversation, picture_message("and this?", DOG))
    assert [(call.segment, call.opened_by) for call in calls] == [(0, "start"), (1, "template")]
    check(calls, pictures_in(conversation.messages))


async def test_a_tokenizer_here_is_not_asked_about_pictures(client, server):
    here = replace(seeing(server), tokenizer="/nowhere")
    message = picture_message("What is it?", CAT)
    assert await client.render(here, [message], add_generation_prompt=True) == await client.render(
        seeing(server), [message], add_generation_prompt=True
    )


async def test_tools_and_settings_of_the_template_go_along(client, server):
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    messages = [picture_message("What is it?", CAT)]
    rendered = await client.render(
        seeing(server), messages, add_generation_prompt=True, tools=tools, template_kwargs={"enable_thinking": False}
    )
    assert '"look"' in await client.detokenize(seeing(server), rendered.ids)


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_aborted_reply_goes_on_after_the_same_pictures(client, streamed):
    options = {"token_delay": 0.01, "pictures": True, "script": lambda request: says_what_it_sees(request) * 4}
    async with ScriptedServer(**options) as one, ScriptedServer(**options) as other:
        way = Way(seeing(one, 1), seeing(other, 2))
        messages = [picture_message("What is it?", CAT, DOG)]
        asked = await client.render(seeing(one), messages, add_generation_prompt=True)
        given: list[Piece] = []

        async def emit(piece: Piece, server: ServerAddress) -> None:
            given.append(piece)

        sampling = asyncio.create_task(
            sample(
                client,
                way,
                asked,
                Sampling(max_tokens=300),
                timeout=60,
                emit=emit if streamed else None,
                pictures=pictures_in(messages),
            )
        )
        await until(lambda: len(given) > 5 if streamed else one.running)
        await post(one, "/abort_requests")
        sampled = await sampling
        assert way.calls == 2
        assert [span.version for span in sampled.spans] == ([1, 2] if sampled.spans[0].version == 1 else [2])
        assert sampled.completion.text == "I see cat and dog, in turn 1." * 4
        record = sampled.record(turn=0, segment=0, context=asked, prompt_tokens=len(asked.ids), sampling=Sampling())
        check([record], pictures_in(messages))
        if streamed:
            assert [token for piece in given for token in piece.token_ids] == record.sampled_ids


async def test_a_server_that_fails_is_left_with_the_pictures(client, server):
    async with ScriptedServer(pictures=True) as broken:
        messages = [picture_message("What is it?", CAT)]
        asked = await client.render(seeing(broken), messages, add_generation_prompt=True)
        broken.switches.broken = True
        way = Way(seeing(broken), seeing(server))
        sampled = await sample(client, way, asked, Sampling(), timeout=60, pictures=pictures_in(messages))
        assert sampled.completion.text == "I see cat, in turn 1."


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_server_that_expands_otherwise_is_found_out(client, server, streamed):
    messages = [picture_message("What is it?", CAT)]
    asked = await client.render(seeing(server), messages, add_generation_prompt=True)
    server.switches.expand_otherwise = True

    async def emit(piece: Piece) -> None:
        raise AssertionError("nothing of it may be given away")

    with pytest.raises(ModelError, match=f"saw {len(asked.ids) + 1} ids, {len(asked.ids)} were rendered, .* index") as caught:
        await client.generate(
            seeing(server), asked, Sampling(), timeout=20, emit=emit if streamed else None, pictures=pictures_in(messages)
        )
    assert caught.value.retryable  # another server of the policy may do better
    conversation = talk(client, server, *messages)
    with pytest.raises(ModelError, match="expanded the pictures to other ids"):
        await conversation.sample(0)
    server.switches.expand_otherwise = False
    check([await conversation.sample(0)], pictures_in(messages))


async def test_a_model_without_eyes_is_not_shown_pictures(client):
    async with ScriptedServer() as blind:
        messages: list[ChatMessage] = [{"role": "user", "content": "Hi"}, picture_message("What is it?", CAT)]
        with pytest.raises(ModelError, match=r"message 1 has a picture: scripted at .* takes none") as caught:
            await client.render(seeing(blind), messages, add_generation_prompt=True)
        assert (caught.value.status, caught.value.retryable) == (400, False)
        asked = TokenPrompt([1, 2, 3], (PlacedPicture(1, 1, DIGEST),))
        with pytest.raises(ModelError, match="takes no pictures") as caught:
            await client.generate(seeing(blind), asked, Sampling(), timeout=20, pictures=pictures_in(messages))
        assert caught.value.retryable
        assert blind.rendered == blind.running == blind.finished == 0


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_pictures_are_the_users_and_the_tools(client, server, role):
    message = picture_message("", CAT) | {"role": role}
    with pytest.raises(ModelError, match=f"message 0 of role '{role}' has a picture"):
        await client.render(seeing(server), [message], add_generation_prompt=True)


async def test_pictures_that_fill_the_context_end_the_episode(client):
    async with ScriptedServer(pictures=True, max_model_len=100) as server:
        with pytest.raises(ContextOverflow):
            await talk(client, server, picture_message("", *[CAT, DOG] * 30)).sample(0)


async def test_random_conversations_are_exact_whatever_servers_do(client):
    """Pictures anywhere, replies that are cut, servers that fail and abort: `check` computes every logprob again."""
    rng = random.Random(7)  # noqa: S311
    async with ScriptedServer(script=says_what_it_sees, pictures=True) as server:
        for _ in range(40):
            conversation = talk(client, server)
            calls = []
            for turn in range(rng.randint(1, 5)):
                for _ in range(rng.randint(1, 2)):
                    conversation.append(_random_message(rng))
                if rng.random() < 0.2:
                    server.switches.fail_next, server.switches.status = 1, 500
                calls.append(await conversation.sample(turn))
            check(calls, pictures_in(conversation.messages))
            stored = SegmentIds()
            for call in calls:
                stored.add(call)
            for number, segment in enumerate(TokenBuffer.from_calls(calls).segments):
                assert stored.first(number, len(segment.ids)) == TokenPrompt(segment.ids, tuple(segment.placed))


def _random_message(rng: random.Random) -> ChatMessage:
    ends = rng.choice(["", "", "", "[[length]]", "[[abort]]"])
    role = rng.choice(["user", "user", "tool"])
    parts: list[dict[str, Any]] = [{"type": "text", "text": ends}] if ends else []
    for _ in range(rng.randint(1, 4)):
        picture = {"type": "picture", "picture": rng.choice([CAT, DOG, OWL])}
        parts.insert(rng.randint(0, len(parts)), rng.choice([picture, {"type": "text", "text": "look"}]))
    return {"role": role, "content": "".join(part.get("text", "") for part in parts), "parts": parts}


def test_a_segment_has_the_places_up_to_any_of_its_calls():
    calls = [_call(0, [1, 2, 3], PlacedPicture(1, 2, DIGEST)), _call(1, [4, 5], PlacedPicture(0, 1, OWL.digest))]
    segments = SegmentIds()
    for call in calls:
        segments.add(call)
    assert segments.first(0, 4) == TokenPrompt([1, 2, 3, 9], (PlacedPicture(1, 2, DIGEST),))
    assert segments.first(0, 7).placed == (PlacedPicture(1, 2, DIGEST), PlacedPicture(4, 1, OWL.digest))
    assert validate(calls).segments[0].placed == list(segments.first(0, 7).placed)


def test_ids_alone_do_not_go_on_from_pictures():
    segments = SegmentIds()
    segments.add(_call(0, [1, 2, 3], PlacedPicture(1, 2, DIGEST)))
    segments.add(replace(_call(1, [1, 2, 3]), segment=1))
    assert segments.extended_by(array("i", [1, 2, 3, 9, 5])) == [1]


def _call(turn: int, context: list[int], *placed: PlacedPicture) -> ModelCallRecord:
    return ModelCallRecord(
        turn=turn,
        segment=0,
        context_ids=context,
        sampled_ids=[9],
        logprobs=[-1.0],
        text="",
        finish_reason="stop",
        prompt_tokens=len(context) if turn == 0 else len(context) + 4,
        policy="p",
        policy_version=0,
        server_id="",
        latency=0.0,
        placed=placed,
    )


@pytest.mark.parametrize(
    ("placed", "problem"),
    [
        ([PlacedPicture(0, 4, DIGEST)], "4 ids from index 0 on, of 3"),
        ([PlacedPicture(3, 1, DIGEST)], "1 ids from index 3 on"),
        ([PlacedPicture(-1, 1, DIGEST)], "from index -1 on"),
        ([PlacedPicture(1, 0, DIGEST)], "0 ids from index 1 on"),
        ([PlacedPicture(1, 1, DIGEST), PlacedPicture(0, 1, DIGEST)], "after a picture that ends at 2"),
        ([PlacedPicture(0, 2, DIGEST), PlacedPicture(1, 1, DIGEST)], "after a picture that ends at 2"),
        ([PlacedPicture(0, 1, DIGEST.upper())], "is no SHA-256"),
    ],
)
def test_stored_places_that_cannot_be_are_refused(placed, problem):
    with pytest.raises(ValueError, match=f"turn 0 has a wrong place for a picture: .*{problem}"):
        validate([_call(0, [1, 2, 3], *placed)])
    assert problem in misplaced(placed, 3)


async def test_the_probe_finds_out_whether_a_model_sees(server):
    found = await probe(server.url)
    assert (found.picture_id, Feature.PICTURES in found.features) == (server.picture_id, True)
    server.switches.expand_otherwise = True
    assert (await probe(server.url)).picture_id is None
    async with ScriptedServer() as blind:
        found = await probe(blind.url)
        assert (found.picture_id, Feature.PICTURES in found.features) == (None, False)
        assert {Feature.GENERATE, Feature.TOKENIZE} <= found.features
    async with ScriptedServer(pictures=True, without=("/v1/chat/completions/render",)) as old:
        assert (await probe(old.url)).picture_id is None


class Kind(Transport):
    """A model server without HTTP: the prompt is a begin, the expanded picture, an end; `target` is what it expands.

    `numbered` pictures have their number among their ids; of more than `limit` the request is refused. `merged`: a picture
    begins with a line break, 3, and that becomes 4 together with one before it.
    """

    def __init__(
        self,
        expanded: list[int],
        target: int,
        *,
        numbered: bool = False,
        merged: bool = False,
        limit: int = 9,
        **answer: Any,
    ) -> None:
        super().__init__()
        self.trials = 0
        self._expanded, self._target, self._answer = expanded, target, answer
        self._numbered, self._merged, self._limit = numbered, merged, limit

    async def request(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, api_key: str = "", timeout: float
    ) -> dict[str, Any]:
        assert body is not None
        if url.endswith("/render"):
            picture = self._picture(0)
            if self._merged and body["messages"][0]["content"][0]["text"].endswith("\n"):
                picture = [4, *picture[1:]]
            ids = [1, *picture, 2]
            places = {"image": [{"offset": 1, "length": len(picture)}]}
            return {"token_ids": ids, "features": {"mm_placeholders": places}} | self._answer
        self.trials += 1
        count = len(body["content_parts"])
        if count > self._limit:
            raise ModelError("At most 1 image(s) may be provided in one prompt.", retryable=False, status=400)
        ids, done = [], 0
        for token in body["token_ids"]:
            if token == self._target and done < count:
                ids += self._picture(done)
                done += 1
            else:
                ids.append(token)
        if done < count:
            raise ModelError("Failed to apply prompt replacement for mm_items['image'][0]", retryable=True, status=500)
        choice = {"text": "x", "finish_reason": "length", "token_ids": [5]}
        return {"choices": [choice], "prompt_token_ids": ids}

    def _picture(self, number: int) -> list[int]:
        return [*self._expanded, 100 + number] if self._numbered else self._expanded


HERE = ServerAddress("http://x", "m", "p", 0, 1000)
RUN, FRAMED = [7] * 20, [8, *[7] * 20, 9]


@pytest.mark.parametrize(
    ("kind", "found", "trials"),
    [
        (Kind(RUN, 7), 7, 2),
        (Kind(FRAMED, 7), 7, 2),
        (Kind(FRAMED, 9), 9, 4),  # what it expands is not what it expands to
        (Kind(RUN, 7, limit=1), 7, 2),
        (Kind(RUN, 7, numbered=True), None, 2),
        (Kind([3, *RUN], 7, merged=True), None, 2),  # 7, then 4
        (Kind(RUN, 5), None, 1),  # what stands for a picture is not among its ids
        (Kind(list(range(10, 60)), 5), None, MAX_TRIALS),
        (Kind(RUN, 7, features=None), None, 0),
        (Kind(RUN, 7, features={"mm_placeholders": {"image": []}}), None, 0),
        (Kind(RUN, 7, features={"mm_placeholders": {"image": [{"offset": 1, "length": 99}]}}), None, 0),
        (Kind(RUN, 7, token_ids=[1]), None, 0),
        (Kind(RUN * 100, 7), None, 0),  # one picture fills the context
    ],
)
async def test_the_picture_id_is_found_by_trial(kind, found, trials):
    assert await find_picture_id(ModelClient(kind), HERE) == found
    assert kind.trials == trials


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ({"features": None}, r"does not tell where its pictures are \(1\)"),
        ({"features": {"mm_placeholders": {"image": [{"offset": 1, "length": 1}] * 2}}}, "does not tell where"),
        ({"features": {"mm_placeholders": {"image": [{"offset": 1}]}}}, "does not tell where"),
        ({"features": {"mm_placeholders": {"image": [{"offset": 99, "length": 1}]}}}, "wrong place for a picture"),
        ({"token_ids": None}, "no 'token_ids'"),
    ],
)
async def test_a_malformed_render_is_the_servers_fault(answer, problem):
    client = ModelClient(Kind(RUN, 7, **answer))
    with pytest.raises(ModelError, match=problem) as caught:
        await client.render(replace(HERE, picture_id=7), [picture_message("", CAT)], add_generation_prompt=True)
    assert caught.value.retryable


async def test_an_answer_that_proves_nothing_is_not_taken():
    class Silent(Kind):
        async def request(self, *args: Any, **more: Any) -> dict[str, Any]:
            return await super().request(*args, **more) | {"prompt_token_ids": None}

    client = ModelClient(Silent(RUN, 7))
    asked = TokenPrompt([1, *RUN, 2], (PlacedPicture(1, 20, DIGEST),))
    address = replace(HERE, picture_id=7, features=frozenset({Feature.GENERATE}))
    with pytest.raises(ModelError, match="does not tell which ids the model saw"):
        await client.generate(address, asked, Sampling(), timeout=20, pictures={DIGEST: CAT})


def test_a_picture_is_sent_as_it_is():
    assert data_url(Picture("image/gif", b"GIF89a")) == "data:image/gif;base64,R0lGODlh"
