"""A model's tokenizer files, as checkpoints hold them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

DEFAULT, TOOL_USE = "default", "tool_use"
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TokenizerFilesError(ValueError):
    """The directory does not hold what is needed. The message names the file and the fix."""


@dataclass(frozen=True)
class TokenizerFiles:
    """`templates` are the chat templates by name; `special_tokens` are the variables that templates know them by."""

    tokenizer: Tokenizer
    templates: dict[str, str]
    special_tokens: dict[str, str]


def read_files(directory: Path) -> TokenizerFiles:
    """Read `tokenizer.json`, `tokenizer_config.json` and the chat template. Raises `TokenizerFilesError`."""
    config = _json_object(directory / "tokenizer_config.json")
    templates = _templates(directory, config)
    if not templates:
        raise TokenizerFilesError(
            f"{directory} has no chat template: put chat_template.jinja beside tokenizer.json, the one that the server uses"
        )
    return TokenizerFiles(_tokenizer(directory / "tokenizer.json", config), templates, _special_tokens(directory, config))


def _tokenizer(path: Path, config: dict[str, Any]) -> Tokenizer:
    if not path.is_file():
        raise TokenizerFilesError(f"{path} is missing: save the model's fast tokenizer there (tokenizer.save_pretrained)")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception
        raise TokenizerFilesError(f"{path} is not a tokenizer: {exc}") from exc
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = tokenizer.get_added_tokens_decoder()
    for number, token in sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0])):
        if int(number) in known:
            continue
        options = {key: token[key] for key in ("lstrip", "rstrip", "single_word", "normalized", "special") if key in token}
        tokenizer.add_tokens([AddedToken(token["content"], **options)])
        if tokenizer.token_to_id(token["content"]) != int(number):
            raise TokenizerFilesError(f"tokenizer_config.json gives {token['content']!r} the id {number}, {path} another one")
    return tokenizer


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Where the same template is found twice, the file of its own holds, as in transformers."""
    given = config.get("chat_template") or {}
    templates = {each["name"]: each["template"] for each in given} if isinstance(given, list) else {}
    if isinstance(given, str):
        templates = {DEFAULT: given}
    if (legacy := directory / "chat_template.json").is_file():
        templates[DEFAULT] = _json_object(legacy)["chat_template"]
    if (file := directory / "chat_template.jinja").is_file():
        templates[DEFAULT] = file.read_text("utf-8")
    named = directory / "additional_chat_templates"
    return templates | {path.stem: path.read_text("utf-8") for path in sorted(named.glob("*.jinja"))}


def _special_tokens(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    named = _json_object(directory / "special_tokens_map.json") | config
    found = {name: named[name] for name in SPECIAL_TOKENS if named.get(name)}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}


def _json_object(path: Path) -> dict[str, Any]:
    """Empty when there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as exc:
        raise TokenizerFilesError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise TokenizerFilesError(f"{path} does not hold a JSON object")
    return value
