"""What goes wrong with requests, in the words of vLLM's API."""

from __future__ import annotations

from aiohttp import web

_TYPES = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError", 500: "InternalServerError"}
ENGINE_DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class BadRequest(Exception):
    """The request is wrong; the message goes back with `status`."""

    def __init__(self, message: str, *, param: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.status = status


class HangUp(Exception):
    """The connection is to be closed without an answer."""


def error_response(status: int, message: str, param: str | None = None) -> web.Response:
    """An error in the shape of OpenAI's API."""
    kind = _TYPES.get(status, "ScriptedError")
    return web.json_response({"error": {"message": message, "type": kind, "param": param, "code": status}}, status=status)


def check_context(prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
    """vLLM's refusals of prompts and replies that do not fit. A reply that does not fit behind its prompt is only cut."""
    if max_tokens > max_model_len:
        raise BadRequest(
            f"max_tokens={max_tokens} cannot be greater than max_model_len={max_model_len}. Please request fewer output "
            f"tokens. (parameter=max_tokens, value={max_tokens})",
            param="max_tokens",
        )
    if prompt_tokens > max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {prompt_tokens} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input "
            f"prompt. (parameter=input_tokens, value={prompt_tokens})",
            param="input_tokens",
        )
    if prompt_tokens == max_model_len or max_tokens < 1:
        left = min(max_tokens, max_model_len - prompt_tokens)
        raise BadRequest(f"max_tokens must be at least 1, got {left}. (parameter=max_tokens, value={left})", param="max_tokens")
