"""Chat templates in the style of well-known models, with their quirks, and tokenizers trained on text that re-merges."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from jinja2.ext import loopcontrols
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from rollouts.llm.errors import ModelError
from rollouts.llm.transport import Transport

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}
        {{- '<|im_start|>system\\nYou are a model.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

# Tools in the system message, results in a user message of their own, reasoning dropped before the last question.
QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_question=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last_question = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_question and reasoning %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {%- if (loop.first and content) or (not loop.first) %}{{- '\\n' }}{%- endif %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

# A beginning-of-text token, trimmed contents, tools in the first question, one call at a time.
LLAMA3 = """\
{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = 'Cutting Knowledge Date: December 2023' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system + '<|eot_id|>' }}
{%- if tools %}
    {%- set first = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
    {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven the following functions:\\n' }}
    {%- for tool in tools %}{{- tool | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
    {{- first + '<|eot_id|>' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- message.content | tojson }}{{- '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

# No generation prompt, strict alternation, tools before the last question, calls named by ids of nine letters.
MISTRAL = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set questions = rest | selectattr('role', 'equalto', 'user') | list %}
{%- set ns = namespace(index=0) %}
{%- for message in rest %}
    {%- if message.role in ('user', 'assistant') and not message.tool_calls %}
        {%- if (message.role == 'user') != (ns.index % 2 == 0) %}
            {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
        {%- endif %}
        {%- set ns.index = ns.index + 1 %}
    {%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == 'user' %}
        {%- if tools and message == questions[-1] %}
            {{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {%- if loop.last and system is defined %}
            {{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' }}
        {%- else %}{{- '[INST] ' + message.content + '[/INST]' }}{%- endif %}
    {%- elif message.tool_calls %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in message.tool_calls %}
            {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should have 9 letters!') }}{%- endif %}
            {{- {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} | tojson }}
            {{- ']' + eos_token if loop.last else ', ' }}
        {%- endfor %}
    {%- elif message.role == 'assistant' %}{{- ' ' + message.content | trim + eos_token }}
    {%- elif message.role == 'tool' %}
        {{- '[TOOL_RESULTS] {"content": ' + message.content | tojson + ', "call_id": "' }}
        {{- message.tool_call_id | default('000000000') + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- raise_exception('Only user and assistant roles are supported') }}{%- endif %}
{%- endfor %}
"""

# No system role, no tool role, other names.
GEMMA = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}
"""

# Wants content as parts, through a macro; marks replies for trainers.
PARTS = """\
{%- macro write(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for part in content %}{{- part.text }}{%- endfor %}{%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- write(message.content) + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}{{- write(message.content) ~ '<|im_end|>' }}{%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class Style:
    """A template and what conversations it takes. `exact` says that it writes contents as they are."""

    source: str
    end_of_turn: str
    roles: frozenset[str] = frozenset({"system", "user", "tool"})
    alternates: bool = False
    tools: bool = False
    exact: bool = False


STYLES = {
    "chatml": Style(CHATML, "<|im_end|>", exact=True),
    "qwen3": Style(QWEN3, "<|im_end|>", tools=True),
    "llama3": Style(LLAMA3, "<|eot_id|>", tools=True),
    "mistral": Style(MISTRAL, "</s>", frozenset({"user", "tool"}), alternates=True, tools=True),
    "gemma": Style(GEMMA, "<end_of_turn>", frozenset({"user"}), alternates=True),
    "parts": Style(PARTS, "<|im_end|>", exact=True),
}
KINDS = ("byte_pairs", "unigram", "word_pieces")
PICTURE, FRAME = "<|picture|>", "<|frame|>"
SPECIALS = [
    *("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", PICTURE, FRAME),
]
FRAGMENTS = [
    "th",
    "e",
    " ",
    "the",
    "re",
    "\n",
    "an",
    "other",
    "número",
    "1",
    "2",
    "12",
    "```",
    "é",
    "日本",
    "🙂",
    "  ",
    "\n\n",
    "\t",
]
CORPUS = [
    "the other number is there and another one is the answer to the other question, then and there, rather than another 1212",
    "system user assistant tool name arguments user\nthe there\n\nother número 日本 answer 12 1 2 222 <tool_call> </tool_call>",
    "".join(FRAGMENTS) * 3,
    "".join(reversed(FRAGMENTS)) * 3,
] * 5


def train(kind: str) -> Tokenizer:
    """A small tokenizer of a kind that models have."""
    specials = [AddedToken(text, special=True, normalized=False) for text in SPECIALS]
    if kind == "byte_pairs":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=420, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
        )
    elif kind == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=specials, unk_token="<unk>", show_progress=False)
    else:
        tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=False)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=specials, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def write_files(directory: Path, tokenizer: Tokenizer, source: str) -> Path:
    """The files of a checkpoint that concern its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "chat_template.jinja").write_text(source)
    return directory


class PlainRenderer:
    """What a server does, without the platform's code: transformers' Jinja settings and one call of the tokenizer."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        environment = jinja2.Environment(  # noqa: S701 - prompts are no HTML
            trim_blocks=True, lstrip_blocks=True, extensions=[_Marked, loopcontrols]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
        environment.globals["raise_exception"] = _refuse
        self._template = environment.from_string(source)
        self._takes_parts = "part in content" in source
        self._tokenizer = tokenizer

    def text(self, messages: Sequence[dict[str, Any]], prompt: bool, tools: Any = None, **variables: Any) -> str:
        """Messages are OpenAI's. Raises `jinja2.TemplateError`."""
        return self._template.render(
            messages=[self._seen(dict(message)) for message in messages],
            tools=tools,
            add_generation_prompt=prompt,
            **{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | variables,
        )

    def ids(self, messages: Sequence[dict[str, Any]], prompt: bool, tools: Any = None, **variables: Any) -> list[int]:
        return self._tokenizer.encode(self.text(messages, prompt, tools, **variables), add_special_tokens=False).ids

    def _seen(self, message: dict[str, Any]) -> dict[str, Any]:
        for call in message.get("tool_calls", ()):
            if isinstance(call["function"]["arguments"], str):
                call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        content = message["content"]
        texts = [part.get("text", PICTURE) for part in content] if isinstance(content, list) else [content]
        if self._takes_parts and message["role"] != "tool":
            return message | {"content": [{"type": "text", "text": text} for text in texts]}
        return message | {"content": "\n".join(texts)}


class Tokenizing(Transport):
    """A server of which only `/tokenize` is there, rendered without the platform's code."""

    def __init__(self, renderer: PlainRenderer) -> None:
        super().__init__()
        self.rendered = 0
        self._renderer = renderer

    async def request(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, api_key: str = "", timeout: float
    ) -> dict[str, Any]:
        assert body is not None and url.endswith("/tokenize")
        variables = body.get("chat_template_kwargs", {})
        try:
            self.rendered += 1
            ids = self._renderer.ids(body["messages"], body["add_generation_prompt"], body.get("tools"), **variables)
        except jinja2.TemplateError as error:
            raise ModelError(str(error), retryable=False, status=400) from error
        return {"tokens": ids}


class _Marked(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
