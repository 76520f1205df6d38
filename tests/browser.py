"""A real browser for tests of pages."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import DEADLINE_S

CHROMIUM = shutil.which("chromium")
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)

NEEDS_BROWSER = [
    pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
]  # fmt: skip


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS.split())
        yield browser
        browser.close()


def picture(page: Any, name: str, height: int) -> None:
    if folder := os.environ.get("PICTURES"):
        clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height}
        page.screenshot(path=Path(folder) / f"{name}.png", full_page=True, clip=clip)


def open_page(browser: Any, url: str, complaints: list[str], **options: Any) -> Any:
    page = browser.new_context(**options).new_page()
    page.set_default_timeout(1000 * DEADLINE_S)
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    return page
