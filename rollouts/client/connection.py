"""Where the server is, and how to introduce oneself."""

from __future__ import annotations

import os
from typing import Any


def http_arguments(base_url: str | None, api_key: str | None) -> dict[str, Any]:
    """Keyword arguments for httpx's clients, from the arguments or PRORL_URL and PRORL_API_KEY. Raises ValueError without."""
    base_url = base_url or os.environ.get("PRORL_URL")
    api_key = api_key or os.environ.get("PRORL_API_KEY")
    if not base_url:
        raise ValueError("Where is the server? Pass base_url or set PRORL_URL.")
    if not api_key:
        raise ValueError("Pass api_key or set PRORL_API_KEY.")
    return {"base_url": base_url, "headers": {"Authorization": f"Bearer {api_key}", "User-Agent": "prorl-client"}}
