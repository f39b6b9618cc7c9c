"""A browser that fails the test when a page logs an error or breaks its content security policy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.conf import settings
from django.db import connections
from django.test import Client
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from pytest_django.live_server_helper import LiveServer

from tests.integration.web_case import WebWorld
from tests.services import chromium


@pytest.fixture
def world(transactional_db: None) -> WebWorld:
    return WebWorld()


@pytest.fixture
def browser(world: WebWorld, live_server: LiveServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Browser]:
    """A fresh Chromium for each test: Playwright keeps an event loop in this thread, which must be gone for other tests."""
    if missing := chromium.why_missing():
        pytest.skip(missing)
    monkeypatch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "1")  # that loop is not ours: rows are built synchronously as elsewhere
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(**chromium.launch_options())
        yield browser
        browser.close()
        connections.close_all()  # beside a running loop Django opens one of its own, which no one else would close


@pytest.fixture
def context(browser: Browser, live_server: LiveServer, world: WebWorld) -> BrowserContext:
    """Signed in as the owner, 1440 by 900."""
    client = Client()
    client.force_login(world.owner)
    session = client.cookies[settings.SESSION_COOKIE_NAME].value
    context = browser.new_context(base_url=live_server.url, viewport={"width": 1440, "height": 900})
    context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": session, "url": live_server.url}])
    return context


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    complaints: list[str] = []
    page = context.new_page()
    page.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    yield page
    assert complaints == []
