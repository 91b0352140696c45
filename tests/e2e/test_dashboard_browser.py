"""The page in a real browser, beside a real server under traffic: what an operator sees and does."""

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import httpx
import pytest

from moeserve.testing.served_engine import wait_until
from moeserve.testing.server import RunningServer, running_server

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(CHROMIUM is None, reason="needs a chromium of the system"),
]

ARGUMENTS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PAGE_TIMEOUT_MS = 60_000
PROMPT = "def read_config(path):\n"


@contextmanager
def traffic(url: str) -> Iterator[None]:
    """Two clients that go on until the end; a server that starts again is waited for."""
    ended = threading.Event()

    def client(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120.0) as http:
            for seed in count(number * 1000):
                if ended.is_set():
                    return
                http.post("/v1/completions", json={"model": "demo", "prompt": PROMPT, "max_tokens": 40, "seed": seed})

    clients = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(2)]
    for each in clients:
        each.start()
    try:
        yield
    finally:
        ended.set()
        for each in clients:
            each.join()


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    arguments = ("demo", "-dp", "2", "--set", "placement.window_s=0.5")
    with running_server(*arguments, "--set", "placement.policy=frozen") as running, traffic(running.url):
        yield running


@pytest.fixture
def page(server: RunningServer) -> Iterator[Any]:
    """The page, open; it must not complain in the browser's console."""
    complaints: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        opened = browser.new_page(viewport={"width": 1280, "height": 900})
        opened.set_default_timeout(PAGE_TIMEOUT_MS)
        opened.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.goto(f"{server.url}/dashboard")
        opened.wait_for_selector("body[data-connection=live]")
        yield opened
        browser.close()
    assert [text for text in complaints if "the server responded with" not in text] == []


def choose(page: Any, tab: str) -> None:
    page.click(f"[data-tab={tab}]")
    assert page.get_attribute(f"[data-tab={tab}]", "aria-selected") == "true"


def confirm(page: Any, button: str) -> None:
    page.click(f"main button:text-is('{button}')")
    page.click("dialog button.primary")


def test_hot_experts_show_and_cells_change(page: Any) -> None:
    choose(page, "experts")
    page.wait_for_selector(".heatmap canvas:visible")
    read_cells = "document.querySelector('.heatmap canvas').toDataURL()"
    before = page.evaluate(read_cells)
    wait_until(lambda: page.evaluate(read_cells) != before)
    page.focus(".heatmap canvas")
    page.keyboard.press("ArrowRight")
    assert "layer 0, expert 0" in page.inner_text(".tip")


def test_a_plan_is_shown_applied_and_rolled_back(page: Any) -> None:
    choose(page, "migrations")
    confirm(page, "Dry run")
    page.wait_for_selector("h2:has-text('Dry run ')")
    confirm(page, "Apply")
    page.wait_for_selector("td:text-is('migrate')")
    page.wait_for_selector("strong:has-text('settling')")
    confirm(page, "Roll back")
    page.wait_for_selector("td:text-is('roll back')")


def test_a_lost_rank_is_an_alarm_until_it_is_back(page: Any, server: RunningServer) -> None:
    server.ranks()[0].kill()
    page.wait_for_selector(".alarm.critical:has-text('Ranks are lost')")
    page.wait_for_selector("#health:text-is('ready')")
    page.wait_for_selector(".alarm", state="detached")
