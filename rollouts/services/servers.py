"""LLM servers: registered after a probe, changed, and removed. How they are watched is in `server_health`."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, transaction
from django.utils import timezone

from rollouts.llm.capabilities import Capabilities, Feature
from rollouts.llm.errors import ModelError
from rollouts.llm.probe import WrongTokenizer, probe
from rollouts.llm.toolformats import TOOL_FORMATS
from rollouts.models import LLMServer, Project

from .assign import address_of
from .errors import Conflict, FieldError, Refused, Unavailable
from .registry import get_or_create_policy
from .server_health import found_columns, wake_dispatcher
from .weight_labels import label_weights

# What token-exact rollouts need, in the words of whoever starts the server.
_NEEDED = {
    Feature.ID_PROMPTS: "prompts of token ids at /v1/completions",
    Feature.TOKEN_IDS: "token ids",
    Feature.LOGPROBS: "logprobs",
}

_ADMISSIONS = {
    "live": LLMServer.Admission.OPEN,
    "draining": LLMServer.Admission.DRAINING,
    "paused": LLMServer.Admission.PAUSED,
}


def register_server(
    *,
    project: Project,
    url: str,
    policy: str,
    model: str = "",
    policy_version: int = 0,
    capacity: int = 64,
    api_key: str = "",
    tokenizer: str = "",
    tool_format: str = "",
    max_model_len: int | None = None,
    allow_text_only: bool = False,
) -> LLMServer:
    """Probe a server and add it to a policy.

    It must take and return token ids, with logprobs, and render chat messages, itself or by a `tokenizer` (a directory of the
    model's tokenizer files, proven equal to the server where both render). With `allow_text_only` a server without these is
    taken too; its trajectories cannot be trained on. `max_model_len` is for servers that do not tell it, or bounds it.
    """
    url = url.rstrip("/")
    _check_url(url)
    _check(capacity=capacity, tool_format=tool_format, max_model_len=max_model_len)
    found = _probe(url, api_key, model, tokenizer)
    if not model and len(found.models) == 1:
        model = found.model
    if model not in found.models:
        raise Refused.field("/model", f"The server serves {', '.join(found.models) or 'nothing'}; name one of these.")
    if not allow_text_only:
        _refuse_text_only(found, tokenizer)
    length = min(filter(None, (found.max_model_len, max_model_len)), default=None)
    if length is None:
        raise Refused.field("/max_model_len", "Give it, in tokens: the server's /v1/models does not tell its max_model_len.")
    try:
        with transaction.atomic():
            server = LLMServer.objects.create(
                project=project,
                policy=get_or_create_policy(project=project, name=policy),
                policy_version=policy_version,
                url=url,
                model=model,
                api_key=api_key,
                capacity=capacity,
                max_model_len=length,
                tokenizer=tokenizer,
                tool_format=tool_format,
                last_probe_at=timezone.now(),
                **found_columns(found),
            )
            label_weights(address_of(server), policy_version)
    except IntegrityError:
        taken = FieldError("/url", "Change the registered one, or remove it first.")
        raise Conflict(f"{model} at {url} is registered already.", [taken]) from None
    wake_dispatcher()
    return server


@dataclass(frozen=True)
class ServerChanges:
    """What is to change; None leaves it. `state` is live, draining or paused."""

    state: str | None = None
    capacity: int | None = None
    policy_version: int | None = None
    api_key: str | None = None
    tokenizer: str | None = None
    tool_format: str | None = None


def change_server(*, server: LLMServer, changes: ServerChanges) -> None:
    """Change a server, all or nothing. It is probed again when its key or its tokenizer changes."""
    _check(capacity=changes.capacity, tool_format=changes.tool_format)
    values: dict[str, Any] = {
        name: value
        for name in ("capacity", "policy_version", "api_key", "tokenizer", "tool_format")
        if (value := getattr(changes, name)) is not None
    }
    if changes.policy_version is not None:
        if server.hold:
            raise Conflict("Its weights are being changed.", [FieldError("/policy_version", "Wait for the end of the update.")])
        values["weights_unknown"] = False
    if changes.state is not None:
        values |= _state_values(server, changes)
    if changes.api_key is not None or changes.tokenizer is not None:
        tokenizer = server.tokenizer if changes.tokenizer is None else changes.tokenizer
        found = _probe(server.url, server.api_key if changes.api_key is None else changes.api_key, server.model, tokenizer)
        if Feature.TOKEN_IDS in server.capabilities.get("features", ()):
            _refuse_text_only(found, tokenizer)
        values |= found_columns(found)
    if changes.policy_version is not None:
        label_weights(address_of(server), changes.policy_version)
    if values:
        LLMServer.objects.filter(id=server.id).update(**values)
        wake_dispatcher()


def set_server_state(*, server: LLMServer, state: str) -> None:
    """`state`: live takes part, draining keeps its rollouts and gets no new ones, paused takes no calls."""
    change_server(server=server, changes=ServerChanges(state=state))


def remove_server(*, server: LLMServer) -> None:
    """Forget a server. Rollouts on it go on at another one with their next turn; stored model calls keep its id."""
    server.delete()


def _state_values(server: LLMServer, changes: ServerChanges) -> dict[str, Any]:
    if changes.state not in _ADMISSIONS:
        raise Refused.field("/state", "Use live, draining or paused; whether a server is dead is found by probing.")
    if server.admission == LLMServer.Admission.ASLEEP:
        raise Conflict("The server is asleep.", [FieldError("/state", "Wake it first.")])
    if server.weights_unknown and changes.state == "live" and changes.policy_version is None:
        fix = "Load its weights and say in policy_version which these are."
        raise Conflict("A weight update failed on this server.", [FieldError("/state", fix)])
    # Whatever became of it meanwhile is found out at once.
    return {"admission": _ADMISSIONS[changes.state], "last_probe_at": None}


def _check_url(url: str) -> None:
    if not re.match(r"https?://[^/]", url):
        raise Refused.field("/url", f"Begin with http:// or https://, such as http://{url.partition('://')[2] or url}.")
    if url.endswith("/v1"):
        raise Refused.field("/url", f"Name the root of the server, without /v1: {url.removesuffix('/v1')}.")


def _check(*, capacity: int | None, tool_format: str | None, max_model_len: int | None = None) -> None:
    if capacity is not None and capacity < 1:
        raise Refused.field("/capacity", "Must be at least 1.")
    if max_model_len is not None and max_model_len < 1:
        raise Refused.field("/max_model_len", "Must be at least 1.")
    if tool_format and tool_format not in TOOL_FORMATS:
        raise Refused.field("/tool_format", f"Use one of {', '.join(TOOL_FORMATS)}.")


def _probe(url: str, api_key: str, model: str, tokenizer: str) -> Capabilities:
    try:
        return asyncio.run(probe(url, api_key=api_key, model=model, tokenizer=tokenizer))
    except WrongTokenizer as error:
        raise Refused.field("/tokenizer", str(error)) from error
    except ModelError as error:
        raise Unavailable(f"{url} did not answer as an LLM server: {error}", [FieldError("/url", str(error))]) from error


def _refuse_text_only(found: Capabilities, tokenizer: str) -> None:
    missing = [what for feature, what in _NEEDED.items() if feature not in found.features]
    if Feature.TOKENIZE not in found.features and not tokenizer:
        missing.append("/tokenize (or give `tokenizer`, a directory of the model's tokenizer files)")
    if missing:
        advice = "Use vLLM 0.10.2 or newer, or set allow_text_only for evaluation without training."
        raise Refused.field(
            "/url", f"The server does not offer {', '.join(missing)}, which token-exact rollouts need. {advice}"
        )
