"""Prompts as ids, made in this process from a directory of tokenizer files."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from rollouts.llm.errors import ModelError
from rollouts.llm.messages import refuse_media, refuse_pictures
from rollouts.llm.tokens.chat import ChatTemplate
from rollouts.llm.tokens.files import DEFAULT, TOOL_USE, TokenizerFilesError, read_files
from rollouts.llm.turns import Tools
from rollouts.llm.types import ChatMessage

# A longer conversation is rendered in a thread, as it would keep the process's other rollouts waiting: about 3 ms.
INLINE_CHARACTERS = 4000
_MESSAGE_CHARACTERS = 40  # what a template takes for a message of none
# What a caller may not set: they are the render's own.
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "chat_template", "tokenize"})


class LocalTokenizer:
    """One model's tokenizer and chat template. Stateless after loading, so that threads may share it."""

    def __init__(self, directory: Path) -> None:
        """Raises `TokenizerFilesError`."""
        files = read_files(directory)
        self._tokenizer = files.tokenizer
        self._variables = files.special_tokens
        try:
            self._templates = {name: ChatTemplate(source) for name, source in files.templates.items()}
        except TemplateError as exc:
            raise TokenizerFilesError(f"the chat template in {directory} is not valid: {exc}") from exc
        if DEFAULT not in self._templates:
            raise TokenizerFilesError(f"{directory} has named chat templates, but none of them is called {DEFAULT!r}")

    def encode(self, text: str) -> list[int]:
        """The canonical ids. Special tokens written out in `text` become their ids, as on the server."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of these ids, special tokens included."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def render_text(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a prompt. Raises `ModelError` of status 400 when the template refuses the messages."""
        refuse_media(messages)
        refuse_pictures(messages, "only a server knows how many ids it becomes")
        if reserved := _RESERVED & (template_kwargs or {}).keys():
            raise ModelError(f"chat_template_kwargs may not set {min(reserved)!r}", retryable=False, status=400)
        template = self._templates[TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT]
        variables = {**self._variables, **(template_kwargs or {})}
        return template.render(messages, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables)

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool,
        tools: Tools | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The ids of a prompt. Raises as `render_text` does."""

        def rendered() -> list[int]:
            return self.encode(
                self.render_text(
                    messages, add_generation_prompt=add_generation_prompt, tools=tools, template_kwargs=template_kwargs
                )
            )

        size = sum(len(message["content"]) + _MESSAGE_CHARACTERS for message in messages)
        return rendered() if size <= INLINE_CHARACTERS else await asyncio.to_thread(rendered)


class LocalTokenizers:
    """The tokenizers of a process by directory, each loaded once, when it is first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[str, LocalTokenizer] = {}
        self._loading = asyncio.Lock()

    async def get(self, directory: str) -> LocalTokenizer:
        """Raises `ModelError` when the directory does not hold what is needed."""
        if directory not in self._loaded:
            async with self._loading:
                if directory not in self._loaded:
                    try:
                        self._loaded[directory] = await asyncio.to_thread(LocalTokenizer, Path(directory))
                    except TokenizerFilesError as exc:
                        raise ModelError(str(exc), retryable=False) from exc
        return self._loaded[directory]
