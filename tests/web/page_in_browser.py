"""The web page in a real browser: `make test-web`. Chromium is Debian's, or CHROMIUM names it."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from playwright.async_api import ConsoleMessage, Page, async_playwright, expect
from redis.asyncio import Redis

from tests.web_support import HOSTILE, TOKEN, Site, served_run

PATIENCE_MILLISECONDS = 60_000


@pytest.fixture
async def site(redis_client: Redis, tmp_path: Path) -> AsyncIterator[Site]:
    async with served_run(redis_client, tmp_path) as served:
        yield served


@pytest.fixture
async def said() -> list[str]:
    """What the browser complained about."""
    return []


@pytest.fixture
async def page(said: list[str]) -> AsyncIterator[Page]:
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert path, "no chromium: apt-get install chromium, or set CHROMIUM"
    expect.set_options(timeout=PATIENCE_MILLISECONDS)

    def heard(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            said.append(message.text)

    async with async_playwright() as playwright:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        browser = await playwright.chromium.launch(executable_path=path, args=sandbox)
        opened = await browser.new_page(viewport={"width": 1280, "height": 1400})
        opened.set_default_timeout(PATIENCE_MILLISECONDS)
        opened.on("console", heard)
        opened.on("pageerror", lambda error: said.append(str(error)))
        yield opened
        await browser.close()


async def test_a_run_is_followed_while_it_grows(site: Site, page: Page, said: list[str]) -> None:
    await site.commit(4)
    await page.goto(f"{site.url}/#token={TOKEN}")
    await expect(page.locator("#run")).to_have_text("example")
    await expect(page.locator("#reward circle")).to_have_count(4)
    await expect(page.locator("#round-step")).to_have_text("3")
    await expect(page.locator("#round rect.right, #round rect.wrong")).to_have_count(12)
    await expect(page.locator("#figures .figure")).to_have_count(8)
    await expect(page.locator("#queue rect").first).to_be_attached()
    await expect(page.locator("#workers tr")).to_have_count(1)
    await expect(page.locator("#samples .sample")).to_have_count(12)
    assert TOKEN not in page.url  # it must not stand in the history
    await site.commit(3)
    await expect(page.locator("#reward circle")).to_have_count(7)
    await expect(page.locator("#round-step")).to_have_text("6")
    await page.locator("#older").click()
    await expect(page.locator("#round-step")).to_have_text("5")
    await site.commit(1)
    await expect(page.locator("#reward circle")).to_have_count(8)
    await expect(page.locator("#round-step")).to_have_text("5")  # it does not follow any more
    assert said == []


async def test_a_reader_looks_through_samples(site: Site, page: Page, said: list[str]) -> None:
    site.example.prompts, site.example.responses = 5, 4
    await site.commit(3)
    await page.goto(f"{site.url}/#token={TOKEN}")
    await expect(page.locator("#samples .sample")).to_have_count(16)
    await page.locator("#forth").click()
    await expect(page.locator("#samples .sample")).to_have_count(4)
    await page.locator("#back").click()
    await expect(page.locator("#samples .sample")).to_have_count(16)
    await page.locator("#sample-step").fill("0")
    await page.locator("#sample-step").press("Enter")
    await expect(page.locator("#samples .turn pre").first).to_have_text("3 8 , 5")
    await expect(page.locator("#samples .facts").first).to_contain_text("first launched in step 0")
    assert said == []


async def test_a_response_that_is_a_script_is_shown_and_does_nothing(
    site: Site, page: Page, said: list[str]
) -> None:
    await site.commit(2, HOSTILE)
    await page.goto(f"{site.url}/#token={TOKEN}")
    response = page.locator("#samples .turn.assistant pre").first
    await expect(response).to_contain_text("<script>window.hurt = 1</script>")
    bars = page.locator("#round title", has_text="<script>window.hurt = 1</script>")
    await expect(bars).to_have_count(12)
    assert await page.evaluate("window.hurt") is None
    assert await page.locator("body script, img, iframe").count() == 0
    assert said == []


async def test_the_policy_stops_a_script_that_gets_into_the_page(
    site: Site, page: Page, said: list[str]
) -> None:
    """The second line: even markup that slips through cannot run."""
    await page.goto(f"{site.url}/#token={TOKEN}")
    await expect(page.locator("#run")).to_have_text("example")
    inject = (
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hurt=1\">')"
    )
    await page.evaluate(inject)
    async with page.expect_event("console"):
        await page.evaluate(
            "{ const s = document.createElement('script'); s.textContent = 'window.hurt = 2';"
            " document.body.append(s); }"
        )
    assert await page.evaluate("window.hurt") is None
    assert any("Content Security Policy" in text for text in said)


async def test_a_reader_without_the_token_sees_no_run(site: Site, page: Page) -> None:
    await site.commit(1)
    await page.goto(site.url)
    await expect(page.locator("#error")).to_contain_text("wrong token, or none")
    assert "example" not in await page.content()
    await page.goto(f"{site.url}/#token={TOKEN}")
    await expect(page.locator("#run")).to_have_text("example")
    await expect(page.locator("#error")).to_be_hidden()
