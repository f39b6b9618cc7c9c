"""Pictures that agents send: in every API, to a scripted model that says what it sees."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from google import genai
from google.genai import types

from rollouts.gateway import AgentSession
from rollouts.gateway.branches import keys_of
from rollouts.gateway.errors import CallRefused, Kind
from rollouts.gateway.pictures import MAX_PICTURES
from rollouts.gateway.remembered import RememberedConversations
from rollouts.gateway.requests import FunctionTool, ModelRequest
from rollouts.lifecycle import Fidelity
from rollouts.llm.capabilities import Feature
from rollouts.llm.messages import data_url
from rollouts.llm.pictures import picture_message
from rollouts.llm.route import FixedRoute
from rollouts.llm.scripted.script import Request
from rollouts.llm.scripted.server import ScriptedServer
from rollouts.llm.scripted.template import chatml
from rollouts.llm.scripted.tokenizer import PICTURE
from rollouts.llm.types import ChatMessage, Sampling, ServerAddress
from sandboxes.protocol import Picture
from tests.pictures import png
from tests.unit.gateways import BASH, KEY, Gateway, calls, serve

PICTURES = {
    "red": png(8, 8, (255, 0, 0)),
    "green": png(16, 8, (0, 255, 0)),
    "blue": png(8, 24, (0, 0, 255)),
}
RED, GREEN, BLUE = PICTURES.values()
NAMES = {picture.data: name for name, picture in PICTURES.items()}
TOOLS = [{"type": "function", "function": BASH}]


def names_them(request: Request) -> str:
    return "I see " + " and ".join(NAMES[data] for data in request.pictures)


def base64_of(picture: Picture) -> str:
    return base64.b64encode(picture.data).decode()


def seeing(server: ScriptedServer) -> ServerAddress:
    return server.address(policy_version=7, features=(Feature.GENERATE, Feature.PICTURES))


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with ScriptedServer(script=names_them, pictures=True) as server:
        yield server


@pytest.fixture
async def gateway(server: ScriptedServer) -> AsyncIterator[Gateway]:
    async with serve(server, route=FixedRoute(seeing(server))) as gateway:
        yield gateway


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as http:
        yield http


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


def checked(gateway: Gateway, *placed: list[str]) -> None:
    """One exact sequence of calls, that were given pictures of these names and stored each once with its message."""
    memory = gateway.memory
    assert memory.validated().fidelity is Fidelity.TOKEN_EXACT
    digests = {picture.digest: name for name, picture in PICTURES.items()}
    assert [[digests[place.digest] for place in call.placed] for call in memory.calls] == list(placed)
    shown = [NAMES[picture.data] for message in memory.messages for picture in message.pictures]
    assert shown == [name for names in placed for name in names]


# --- OpenAI's chat completions --------------------------------------------------------------------------------------------


def part(picture: Picture, **more: str) -> dict:
    return {"type": "image_url", "image_url": {"url": data_url(picture), **more}}


async def test_openai_chat(gateway, client):
    look = [{"type": "text", "text": "What is"}, part(RED, detail="high"), {"type": "text", "text": f"[[reply:{calls('ls')}]]"}]
    messages: list[Any] = [{"role": "user", "content": look}]
    ask: dict[str, Any] = {"model": "any", "tools": TOOLS, "messages": messages}
    answer = await client.chat.completions.create(**ask)
    assert answer.usage.prompt_tokens == gateway.memory.calls[0].prompt_tokens
    (call,) = answer.choices[0].message.tool_calls
    messages += [
        answer.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "a file"}, part(GREEN), part(GREEN)]},
    ]
    text = ""
    async for chunk in await client.chat.completions.create(**ask, stream=True):
        text += chunk.choices[0].delta.content or ""
    assert text == "I see red and green and green"
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": [part(BLUE)]}]
    answer = await client.chat.completions.create(**ask)
    assert answer.choices[0].message.content == "I see red and green and green and blue"
    checked(gateway, ["red"], ["green", "green"], ["blue"])
    assert [(call.arguments["command"], call.output) for call in gateway.memory.tool_calls] == [("ls", "a file")]
    first = gateway.memory.messages[0]
    assert first.content.startswith("What is\n[[reply") and first.pictures == (RED,)


async def test_text_alone_in_parts_is_one_text_as_before(gateway, client):
    texts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    for content in (texts, "a\nb"):
        await client.chat.completions.create(model="m", messages=[{"role": "user", "content": content}])
    assert gateway.memory.prompts[0] == gateway.memory.prompts[1]
    assert [call.opened_by for call in gateway.memory.calls] == ["start", "sibling"]


async def test_several_choices_and_tries_share_a_prompt_with_its_pictures(gateway, client):
    ask: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": [part(RED), part(BLUE)]}]}
    answer = await client.chat.completions.create(**ask, n=3)
    assert {choice.message.content for choice in answer.choices} == {"I see red and blue"}
    await client.chat.completions.create(**ask)
    assert len({tuple(prompt) for prompt in gateway.memory.prompts}) == 1
    assert [len(call.placed) for call in gateway.memory.calls] == [2] * 4
    assert len(gateway.memory.validated().segments) == 4
    assert [len(message.pictures) for message in gateway.memory.messages] == [2, 0, 0, 0, 0]


async def test_another_picture_is_another_conversation(gateway, client):
    first = {"role": "user", "content": "[[reply:yes]]"}

    async def ask(*parts: dict) -> str:
        messages: list[Any] = [first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": list(parts)}]
        return (await client.chat.completions.create(model="m", messages=messages)).choices[0].message.content

    await client.chat.completions.create(model="m", messages=[first])
    text = {"type": "text", "text": "this?"}
    assert [await ask(*parts) for parts in ([text, part(RED)], [part(RED), text], [text, part(BLUE)])] == [
        *("I see red", "I see red", "I see blue")
    ]
    assert [(call.segment, call.opened_by) for call in gateway.memory.calls] == [
        *[(0, "start"), (0, ""), (1, "sibling"), (2, "sibling")]
    ]
    assert len({call.conversation_key for call in gateway.memory.calls}) == 4
    gateway.memory.validated()


async def test_a_change_to_an_earlier_picture_begins_a_segment(gateway, client):
    messages: list[Any] = [{"role": "user", "content": "[[reply:yes]]"}, {"role": "assistant", "content": "yes"}]
    messages += [{"role": "user", "content": [part(RED)]}]
    await client.chat.completions.create(model="m", messages=messages[:1])
    answer = await client.chat.completions.create(model="m", messages=messages)
    messages += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": [part(BLUE)]}]
    messages[2] = {"role": "user", "content": [part(GREEN)]}
    answer = await client.chat.completions.create(model="m", messages=messages)
    assert answer.choices[0].message.content == "I see green and blue"
    assert [len(message.pictures) for message in gateway.memory.messages if message.turn == 2] == [1, 0, 1, 0]
    assert gateway.memory.validated().fidelity is Fidelity.SEGMENTED


# --- The other APIs -------------------------------------------------------------------------------------------------------


async def test_anthropic_messages(gateway):
    def block(picture: Picture) -> Any:
        return {"type": "image", "source": {"type": "base64", "media_type": picture.mime, "data": base64_of(picture)}}

    async with anthropic.AsyncAnthropic(base_url=gateway.url, api_key=KEY, max_retries=0) as client:
        look = [block(RED), {"type": "text", "text": f"What is it?[[reply:{calls('ls')}]]"}]
        messages: list[Any] = [{"role": "user", "content": look}]
        tool: Any = {"name": BASH["name"], "description": BASH["description"], "input_schema": BASH["parameters"]}
        ask: dict[str, Any] = {"model": "m", "messages": messages, "tools": [tool]}
        answer = await client.messages.create(**ask, max_tokens=200)
        result = {"type": "tool_result", "tool_use_id": answer.content[0].id}
        shown = [{**result, "content": [{"type": "text", "text": "a file"}, block(GREEN)]}, block(BLUE)]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": shown}]
        counted = await client.messages.count_tokens(**ask)
        async with client.messages.stream(**ask, max_tokens=200) as stream:
            assert await stream.get_final_text() == "I see red and green and blue"
    assert counted.input_tokens == gateway.memory.calls[1].prompt_tokens
    checked(gateway, ["red"], ["green", "blue"])
    assert [call.output for call in gateway.memory.tool_calls] == ["a file"]


async def test_openai_responses(gateway, http):
    async def ask(*items: dict, **more: str) -> dict:
        body = {"model": "m", "input": list(items), "tools": [{"type": "function", **BASH}], **more}
        answer = await http.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def shown(picture: Picture) -> dict:
        return {"type": "input_image", "image_url": data_url(picture), "detail": "auto"}

    question = [{"type": "input_text", "text": f"Look.[[reply:{calls('ls')}]]"}, shown(RED)]
    first = await ask({"role": "user", "content": question})
    (call,) = first["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": [shown(GREEN)]}
    second = await ask(result, previous_response_id=first["id"])
    assert second["output"][0]["content"][0]["text"] == "I see red and green"
    third = await ask({"role": "user", "content": [shown(BLUE)]}, previous_response_id=second["id"])
    assert third["output"][0]["content"][0]["text"] == "I see red and green and blue"
    checked(gateway, ["red"], ["green"], ["blue"])


async def test_google_generate_content(gateway, http):
    picture = {"mime_type": GREEN.mime, "data": base64_of(GREEN)}
    tools = [types.Tool(function_declarations=[types.FunctionDeclaration(**BASH)])]
    look = [types.Part.from_bytes(data=RED.data, mime_type=RED.mime), types.Part(text=f"[[reply:{calls('ls')}]]")]
    contents: list[Any] = [types.Content(role="user", parts=look)]
    by_hand = types.AutomaticFunctionCallingConfig(disable=True)
    client = genai.Client(api_key=KEY, http_options={"base_url": gateway.url, "httpx_async_client": http})
    answer = await client.aio.models.generate_content(
        model="m", contents=contents, config=types.GenerateContentConfig(tools=tools, automatic_function_calling=by_hand)
    )
    client.close()
    body = {
        "contents": [
            {"role": "user", "parts": [part.model_dump(mode="json", by_alias=True, exclude_none=True) for part in look]},
            answer.candidates[0].content.model_dump(mode="json", by_alias=True, exclude_none=True),
            {
                "role": "user",
                "parts": [
                    {"functionResponse": {"name": "bash", "response": {"output": "x"}, "parts": [{"inline_data": picture}]}},
                    {"inlineData": {"mimeType": BLUE.mime, "data": base64_of(BLUE)}},
                ],
            },
        ],
        "tools": [{"functionDeclarations": [BASH]}],
    }
    second = await http.post("/v1beta/models/m:generateContent", json=body)
    counted = await http.post("/v1beta/models/m:countTokens", json={"generateContentRequest": body})
    told = second.json()
    assert told["candidates"][0]["content"]["parts"][0]["text"] == "I see red and green and blue"
    assert counted.json()["totalTokens"] == told["usageMetadata"]["promptTokenCount"]
    checked(gateway, ["red"], ["green", "blue"])
    assert [call.output for call in gateway.memory.tool_calls] == ["x"]


# --- What is refused ------------------------------------------------------------------------------------------------------


def chat(content: Any, role: str = "user") -> dict:
    return {"messages": [{"role": role, "content": content}]}


def chat_url(url: Any) -> dict:
    return chat([{"type": "image_url", "image_url": {"url": url}}])


def messages(source: Any, role: str = "user") -> dict:
    return {"max_tokens": 5, **chat([{"type": "image", "source": source}], role)}


def responses(role: str = "user", **image: Any) -> dict:
    return {"input": [{"role": role, "content": [{"type": "input_image", **image}]}]}


def contents(part: Any, **more: Any) -> dict:
    return {"contents": [{"role": "user", "parts": [part]}], **more}


def source(data: str, kind: str = "image/png") -> dict:
    return {"type": "base64", "media_type": kind, "data": data}


SVG = base64.b64encode(b"<svg/>").decode()
HUGE = base64.b64encode(RED.data[:16] + b"\x00\x00\x40\x00" * 2 + RED.data[24:]).decode()  # so wide and high it says
CHAT, ANTHROPIC, RESPONSES, GOOGLE = (
    *("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1beta/models/m:generateContent"),
)


REFUSED: list[tuple[str, dict, str, str]] = [
    (CHAT, chat_url("https://example.com/a.png"), "messages.0.content.0.image_url.url", "nothing is fetched"),
    (CHAT, chat_url("file:///etc/passwd"), "messages.0.content.0.image_url.url", "nothing is fetched"),
    (CHAT, chat_url(None), "messages.0.content.0.image_url.url", "nothing is fetched"),
    (CHAT, chat_url(5), "messages.0.content.0.image_url.url", "must be a string"),
    (CHAT, chat_url("data:image/png,abc"), "messages.0.content.0.image_url.url", "must be data:TYPE;base64,DATA"),
    (CHAT, chat_url("data:image/png;base64"), "messages.0.content.0.image_url.url", "must be data:TYPE;base64,DATA"),
    (CHAT, chat_url("data:image/png;base64,"), "messages.0.content.0.image_url.url", "none of the types"),
    (CHAT, chat_url("data:image/png;base64,A A="), "messages.0.content.0.image_url.url", "not base64"),
    (CHAT, chat_url("data:image/png;base64,ä==="), "messages.0.content.0.image_url.url", "not base64"),
    (CHAT, chat_url(f"data:image/svg+xml;base64,{SVG}"), "messages.0.content.0.image_url.url", "none of the types"),
    (CHAT, chat_url(f"data:image/gif;base64,{base64_of(RED)}"), "messages.0.content.0.image_url.url", "type image/png"),
    (CHAT, chat_url(f"data:image/png;base64,{HUGE}"), "messages.0.content.0.image_url.url", "pixels"),
    (CHAT, chat([{"type": "image_url", "image_url": "x"}]), "messages.0.content.0.image_url", "must be a JSON object"),
    (CHAT, chat([{"type": "image_url"}]), "messages.0.content.0.image_url", "is required"),
    (CHAT, chat([part(RED)], "system"), "messages.0.content.0.type", "of the user or in the result of a tool"),
    (CHAT, chat([part(RED)], "assistant"), "messages.0.content.0.type", "of the user or in the result of a tool"),
    (CHAT, chat([part(RED)] * 101), f"messages.0.content.{MAX_PICTURES}.image_url.url", "more than the 100 pictures"),
    (CHAT, chat([{"type": "file", "file": {}}]), "messages.0.content.0.type", "send text or pictures"),
    (ANTHROPIC, messages({"type": "url", "url": "https://a"}), "messages.0.content.0.source.type", "nothing is fetched"),
    (ANTHROPIC, messages({"type": "file", "file_id": "f"}), "messages.0.content.0.source.type", "nothing is fetched"),
    (ANTHROPIC, messages(None), "messages.0.content.0.source", "is required"),
    (ANTHROPIC, messages(source("AA==")), "messages.0.content.0.source.data", "none of the types"),
    (ANTHROPIC, messages(source(base64_of(RED), "image/webp")), "messages.0.content.0.source.media_type", "'image/webp'"),
    (ANTHROPIC, messages(source("AA=="), "assistant"), "messages.0.content.0.type", "'image' is not supported"),
    (
        *(ANTHROPIC, {**chat("hi"), "max_tokens": 5, "system": [{"type": "image", "source": source(base64_of(RED))}]}),
        *("system.0.type", "of the user or in the result of a tool"),
    ),
    (RESPONSES, responses(file_id="file-1"), "input.0.content.0.file_id", "files are not kept"),
    (RESPONSES, responses(image_url="http://a/b.png"), "input.0.content.0.image_url", "nothing is fetched"),
    (RESPONSES, responses("system", image_url=data_url(RED)), "input.0.content.0.type", "result of a tool"),
    (RESPONSES, responses("assistant", image_url=data_url(RED)), "input.0.content.0.type", "result of a tool"),
    (GOOGLE, contents({"fileData": {"fileUri": "gs://a"}}), "contents.0.parts.0.fileData", "files are not kept"),
    (
        *(GOOGLE, contents({"functionResponse": {"name": "f", "parts": [{"fileData": {}}]}})),
        *("contents.0.parts.0.functionResponse.parts.0.fileData", "files are not kept"),
    ),
    (GOOGLE, contents({"inlineData": {"data": "AA=="}}), "contents.0.parts.0.inlineData.data", "none of the types"),
    (
        *(GOOGLE, contents({"inline_data": {"data": base64_of(RED), "mime_type": "image/gif"}})),
        *("contents.0.parts.0.inline_data.mime_type", "'image/gif'"),
    ),
    (
        *(GOOGLE, contents({"text": "x"}, systemInstruction={"parts": [{"inlineData": {}}]})),
        *("systemInstruction.parts.0.inlineData", "result of a tool"),
    ),
]


async def test_what_is_no_picture_at_its_place_is_refused_by_name(gateway, http):
    for path, body, field, why in REFUSED:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["message"].startswith(f"{field}: ") and why in error["message"]
        assert error.get("param", field) == field
    assert gateway.memory.records == []


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, chat([part(RED)]), "messages.0.content.0.image_url.url"),
        (ANTHROPIC, messages(source(base64_of(RED))), "messages.0.content.0.source.data"),
        (RESPONSES, responses(image_url=data_url(RED)), "input.0.content.0.image_url"),
        (
            GOOGLE,
            contents({"inlineData": {"data": base64_of(RED), "mimeType": "image/png"}}),
            "contents.0.parts.0.inlineData.data",
        ),
    ],
)
async def test_a_model_without_eyes(path, body, field):
    async with ScriptedServer() as server, serve(server) as gateway:
        async with httpx.AsyncClient(base_url=gateway.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=30) as http:
            answer = await http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"] == (
            f"{field}: the session's model takes no pictures; send text only"
        )
        assert server.rendered == 0 and gateway.memory.records == [] and gateway.session.failure is None


async def test_a_model_without_eyes_refuses_later_pictures_too():
    async with ScriptedServer() as server, serve(server) as gateway:
        first: ChatMessage = {"role": "user", "content": "[[reply:yes]]"}
        reply = (await gateway.session.reply(request(first))).told.message()
        with pytest.raises(Exception, match="takes no pictures"):
            await gateway.session.reply(request(first, reply, picture_message("", RED)))
        await gateway.session.reply(request(first, reply, picture_message("and now?")))
        assert [call.segment for call in gateway.memory.calls] == [0, 0]


# --- Sessions -------------------------------------------------------------------------------------------------------------


def request(*messages: ChatMessage, **more: Any) -> ModelRequest:
    return ModelRequest(dialect="test", model="m", messages=messages, **more)


async def test_a_session_goes_on_where_another_process_left_it(gateway, server):
    conversation = [picture_message("one", RED)]
    conversation.append((await gateway.session.reply(request(*conversation))).told.message())
    memory = gateway.memory
    other = AgentSession(gateway.client, FixedRoute(seeing(server)), memory, sampling=Sampling(), call_timeout=20, model="m")
    other.restore(memory.calls, next_message=len(memory.messages))
    conversation.append(picture_message("two", BLUE))
    reply = await other.reply(request(*conversation))
    assert reply.told.content == "I see red and blue"
    again = await other.reply(request(*conversation))
    assert (again.record.opened_by, again.told.content) == ("sibling", "I see red and blue")
    assert [call.segment for call in memory.calls] == [0, 0, 1]
    memory.validated()
    await other.close()


async def test_a_server_that_expands_otherwise_is_no_ones_reply(gateway, server, client):
    server.switches.expand_otherwise = True
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(**chat([part(RED)]), model="m")
    assert gateway.memory.records == [] and "other ids" in str(gateway.session.failure)


async def test_a_prompt_that_is_too_long_with_its_pictures(gateway, http):
    long = {"type": "text", "text": "long " * 9000}
    for path, body, words in [
        (CHAT, chat([part(RED), long]), "maximum context length is 8192 tokens"),
        (f"{ANTHROPIC}/count_tokens", {**messages(source(base64_of(RED))), "system": [long]}, "prompt is too long"),
    ]:
        answer = await http.post(path, json=body)
        assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text
    assert gateway.session.failure is None and gateway.memory.records == []


def without_tools_pictures(messages: Sequence[ChatMessage], add_generation_prompt: bool) -> str:
    shown = [{**m, "content": m["content"].replace(PICTURE, "")} if m["role"] == "tool" else m for m in messages]
    return chatml(shown, add_generation_prompt)  # type: ignore[arg-type]


async def test_a_template_without_a_place_for_a_tools_pictures_is_no_failure_of_its_server():
    async with (
        ScriptedServer(template=without_tools_pictures, pictures=True) as server,
        serve(server, route=FixedRoute(seeing(server))) as gateway,
    ):
        first = picture_message(f"look[[reply:{calls('ls')}]]", RED)
        tool = FunctionTool(BASH["name"], BASH["description"], BASH["parameters"])
        reply = (await gateway.session.reply(request(first, tools=(tool,)))).told.message()
        result = picture_message("a file", GREEN, role="tool")
        result["tool_call_id"] = reply["tool_calls"][0]["id"]
        with pytest.raises(CallRefused, match="the pictures cannot be shown") as refused:
            await gateway.session.reply(request(first, reply, result, tools=(tool,)))
        assert refused.value.kind is Kind.INVALID and gateway.session.failure is None


async def test_a_raw_prompt_goes_on_from_nothing_that_has_pictures(gateway):
    """Ids alone would not send them again."""
    first = (await gateway.session.reply(request(picture_message("one", RED)))).record
    raw = (*first.context_ids, *first.sampled_ids, 65)
    await gateway.session.reply(ModelRequest(dialect="test", model="m", prompt=raw))
    assert [call.segment for call in gateway.memory.calls] == [0, 1]
    gateway.memory.validated()


async def test_a_server_that_takes_only_messages_gets_the_pictures_in_them(server):
    address = replace(server.address(), features=frozenset({Feature.CHAT_TOOLS}))
    async with serve(server, route=FixedRoute(address)) as gateway:
        reply = await gateway.session.reply(request(picture_message("one", RED, BLUE)))
        assert reply.told.content == "I see red and blue"
        assert gateway.memory.messages[0].pictures == (RED, BLUE)
        assert gateway.session.fidelity is Fidelity.TEXT_ONLY


def test_keys_of_text_stay_what_is_stored_for_running_sessions():
    call = {"id": "a", "type": "function", "function": {"name": "bash", "arguments": {"command": "ls"}}}
    keys = keys_of(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi", "name": "me"},
            {"role": "assistant", "content": " yes ", "tool_calls": [call]},
            {"role": "tool", "content": "a b", "tool_call_id": "a"},
        ]
    )
    assert keys == [
        "eec59db98feb556fe4edcfbd90f5bdfb",
        "b0380fe34cbaad612f3b90ace85dac10",
        "d9a538f9506ecf25e0af53c6fcab544c",
        "8e8344ea8e3e75b330131d2cef8e788e",
    ]


def test_pictures_count_among_what_is_remembered():
    kept = RememberedConversations()
    for number in range(4):
        kept.add(str(number), (picture_message("look", Picture("image/png", bytes(12_000_000))),))
    assert list(kept) == ["2", "3"]
