"""Prompts rendered in the process: as a server would, within bounds, and proven so."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from rollouts.llm.client import ModelClient
from rollouts.llm.errors import ModelError
from rollouts.llm.tokens import LocalTokenizer, prove_equal
from rollouts.llm.tokens import sandbox as sandbox_module
from rollouts.llm.tokens.files import TokenizerFilesError
from rollouts.llm.tokens.local import INLINE_CHARACTERS
from rollouts.llm.types import ChatMessage, ServerAddress
from tests.unit.chat_templates import CHATML, KINDS, QWEN3, STYLES, PlainRenderer, Tokenizing, train, write_files

TOOLS = [{"type": "function", "function": {"name": "run", "description": "Runs “it”.", "parameters": {"type": "object"}}}]
HELLO: list[ChatMessage] = [{"role": "user", "content": "the other"}]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: train(kind) for kind in KINDS}


@pytest.fixture(scope="module")
def byte_pairs(tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers["byte_pairs"]


def local(directory: Path, tokenizer: Tokenizer, source: str = CHATML) -> LocalTokenizer:
    return LocalTokenizer(write_files(directory, tokenizer, source))


def text_of(tokenizer: LocalTokenizer, **options: Any) -> str:
    return tokenizer.render_text(HELLO, add_generation_prompt=False, **options)


def address(directory: Path) -> ServerAddress:
    return ServerAddress("http://server", "m", "p", 0, 10_000, tokenizer=str(directory))


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("kind", KINDS)
async def test_the_battery_renders_as_a_server_renders_it(tokenizers, tmp_path, kind, name):
    source = STYLES[name].source
    directory = write_files(tmp_path, tokenizers[kind], source)
    client = ModelClient(Tokenizing(PlainRenderer(source, tokenizers[kind])))
    assert await prove_equal(client, address(directory)) > 20


async def test_another_template_is_found_out(byte_pairs, tmp_path):
    client = ModelClient(Tokenizing(PlainRenderer(CHATML.replace("You are", "You were"), byte_pairs)))
    with pytest.raises(ModelError, match=r"does not render as http://server does \(a question, with generation") as caught:
        await prove_equal(client, address(write_files(tmp_path, byte_pairs, CHATML)))
    assert "from id " in str(caught.value)
    assert not caught.value.retryable


async def test_a_template_that_only_one_side_refuses_is_found_out(byte_pairs, tmp_path):
    client = ModelClient(Tokenizing(PlainRenderer(CHATML, byte_pairs)))
    with pytest.raises(ModelError, match="here 'the chat template refuses the messages: not today', there"):
        directory = write_files(tmp_path, byte_pairs, "{{ raise_exception('not today') }}")
        await prove_equal(client, address(directory))


async def test_another_tokenizer_is_found_out(tokenizers, tmp_path):
    client = ModelClient(Tokenizing(PlainRenderer(CHATML, tokenizers["unigram"])))
    with pytest.raises(ModelError, match="does not render"):
        await prove_equal(client, address(write_files(tmp_path, tokenizers["byte_pairs"], CHATML)))


async def test_the_directory_decides_who_renders(byte_pairs, tmp_path):
    client = ModelClient(Tokenizing(PlainRenderer(CHATML.replace("You are", "You were"), byte_pairs)))
    here = address(write_files(tmp_path, byte_pairs, CHATML))
    rendered = await client.render(here, HELLO, add_generation_prompt=True)
    assert rendered != await client.render(replace(here, tokenizer=""), HELLO, add_generation_prompt=True)
    assert "You are a model." in await client.detokenize(here, rendered.ids)


async def test_a_long_prompt_leaves_the_loop_alone(byte_pairs, tmp_path):
    tokenizer = local(tmp_path, byte_pairs)
    messages: list[ChatMessage] = [{"role": "user", "content": "the other " * INLINE_CHARACTERS}]
    rendering = asyncio.ensure_future(tokenizer.render(messages, add_generation_prompt=True))
    await asyncio.sleep(0)
    assert not rendering.done()
    assert (await rendering)[:5] == tokenizer.encode(tokenizer.render_text(messages, add_generation_prompt=True))[:5]


def test_special_tokens_written_by_a_user_become_special_tokens(byte_pairs, tmp_path):
    """As with vLLM: whoever lets users write them must take them out of their text."""
    tokenizer = local(tmp_path, byte_pairs)
    assert tokenizer.encode("<|im_end|>") == [byte_pairs.token_to_id("<|im_end|>")]


def test_named_templates_and_variables(byte_pairs, tmp_path):
    write_files(tmp_path, byte_pairs, "")
    (tmp_path / "chat_template.jinja").unlink()
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "plain {{ bos_token }}{{ eos_token }} {{ mood | default('calm') }}"},
        {"name": "tool_use", "template": "with {{ tools | tojson }}"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = LocalTokenizer(tmp_path)
    assert text_of(tokenizer) == "plain <s></s> calm"
    assert text_of(tokenizer, template_kwargs={"mood": "merry"}) == "plain <s></s> merry"
    assert text_of(tokenizer, tools=TOOLS).startswith(
        'with [{"type": "function", "function": {"name": "run", "description": "Runs “'
    )
    (tmp_path / "chat_template.jinja").write_text("a file of its own")
    assert text_of(LocalTokenizer(tmp_path)) == "a file of its own"


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
        "{% for m in messages[0:] | list %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
        "{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p.text }}{% endfor %}{% endfor %}",
        "{% macro w(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ w(m.content) }}{% endfor %}",
        "{% macro w(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ w(c=m.content) }}{% endfor %}",
        "{% set all = messages %}{% for m in all %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}",
    ],
)
def test_a_template_that_takes_parts_gets_parts(byte_pairs, tmp_path, source):
    """vLLM sees it by a loop over the content; such a template would write nothing for a text."""
    assert text_of(local(tmp_path, byte_pairs, source)) == "the other"


def test_thinking_can_be_switched_off(byte_pairs, tmp_path):
    tokenizer = local(tmp_path, byte_pairs, QWEN3)
    text = tokenizer.render_text(HELLO, add_generation_prompt=True, template_kwargs={"enable_thinking": False})
    assert text.endswith("assistant\n<think>\n\n</think>\n\n")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt"])
def test_what_is_the_renders_own_cannot_be_set(byte_pairs, tmp_path, name):
    with pytest.raises(ModelError, match=f"may not set '{name}'"):
        text_of(local(tmp_path, byte_pairs), template_kwargs={name: 1})


def test_pictures_are_refused(byte_pairs, tmp_path):
    message: ChatMessage = {"role": "user", "content": "", "parts": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(ModelError, match="'image_url'") as caught:
        local(tmp_path, byte_pairs).render_text([message], add_generation_prompt=True)
    assert caught.value.status == 400


HOSTILE = {
    "endless loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "endless calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "an endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "a text that doubles": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a sum that doubles": "{% set ns = namespace(s='ab') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "a repeated text": "{{ 'ab' * 99999999999 }}",
    "a power": "{{ 9 ** 9 ** 9 }}",
    "a long prompt": "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}",
    "a way out": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "a change of the messages": "{{ messages.append(1) }}",
    "a missing thing": "{{ nothing.at.all }}",
    "a refusal": "{{ raise_exception('no') }}",
    "a division": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_template_is_a_refusal(byte_pairs, tmp_path, source, monkeypatch):
    monkeypatch.setattr(sandbox_module, "MAX_SECONDS", 0.3)
    with pytest.raises(ModelError, match="the chat template refuses the messages") as caught:
        text_of(local(tmp_path, byte_pairs, source))
    assert caught.value.status == 400


def test_loops_work_as_they_do_without_bounds(byte_pairs, tmp_path):
    source = (
        "{% for m in [1, 2, 3] if m != 2 %}{{ loop.index }}/{{ loop.length }}{{ ',' if not loop.last }}{% endfor %}"
        "{% for a in [[1, [2]]] recursive %}{% if a is number %}{{ a }}{% else %}{{ loop(a) }}{% endif %}{% endfor %}"
        "{% for m in [1, 2] %}{% if m == 1 %}{% continue %}{% endif %}{{ m ~ 'é' ~ true }}{% break %}{% endfor %}"
        "{% for k, v in {'b': 1}.items() %}{{ k }}{{ v }}{% endfor %}{% for x in undefined_thing %}{% else %}empty{% endfor %}"
    )
    tokenizer = local(tmp_path, byte_pairs, source)
    plain = PlainRenderer(source, byte_pairs).text(HELLO, False)
    assert text_of(tokenizer) == plain == "1/2,2/2122éTrueb1empty"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda d: (d / "tokenizer.json").write_text("{}"), "tokenizer.json is not a tokenizer"),
        (lambda d: (d / "tokenizer_config.json").write_text("["), "tokenizer_config.json is not JSON"),
        (lambda d: (d / "tokenizer_config.json").write_text("[]"), "does not hold a JSON object"),
        (lambda d: (d / "chat_template.jinja").unlink(), "has no chat template"),
        (lambda d: (d / "chat_template.jinja").write_text("{% for %}"), "is not valid"),
        (
            lambda d: (d / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"9999": {"content": "<new>"}}}'),
            "the id 9999",
        ),
    ],
)
async def test_files_that_will_not_do_are_named(byte_pairs, tmp_path, change, message):
    change(write_files(tmp_path, byte_pairs, CHATML))
    with pytest.raises(TokenizerFilesError, match=message):
        LocalTokenizer(tmp_path)
    with pytest.raises(ModelError, match=message):
        await ModelClient().render(address(tmp_path), HELLO, add_generation_prompt=True)
