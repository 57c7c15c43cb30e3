"""The chat page in a real browser: what a person types, sees and stops."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from beds.fake_engine import FakeEngine, Piece, Script, scripted
from beds.live_server import LiveServer, live_server, wait_until
from octavo.errors import QueueFull

pytestmark = pytest.mark.browser

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
PHONE_WIDTH = 390
HTML = "<b>bold</b> <img src=x onerror=\"document.title='owned'\"> &amp; <script>1</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    assert path, (
        'the chat page needs Chromium: install it, or leave these out with -m "not browser"'
    )
    expect.set_options(timeout=20_000)
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield running
        running.close()


@contextmanager
def open_page(browser: Browser, server: LiveServer) -> Iterator[Page]:
    """The chat page; it must ask nobody but its server, and no script of it may fail."""
    page = browser.new_page()
    asked: list[str] = []
    faults: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(server.url + "/")
    yield page
    page.close()
    assert [url for url in asked if not url.startswith((server.url, "data:"))] == []
    assert faults == []


@contextmanager
def chat(browser: Browser, engine: FakeEngine) -> Iterator[Page]:
    with live_server(engine) as server, open_page(browser, server) as page:
        yield page


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def sent(engine: FakeEngine, number: int) -> str:
    """The conversation that the engine was given, as text."""
    return engine.tokenizer.decode(engine.submitted[number].prompt)


def endless(*_: object) -> Iterator[Piece]:
    while True:
        yield Piece("on and ", (97,))


def pausing(engine: FakeEngine) -> Script:
    """Says three words, and holds the engine after the second."""

    def script(*_: object) -> Iterator[Piece]:
        yield Piece("one ", (1,))
        engine.hold()
        yield Piece("two ", (2,))
        yield Piece("three", (3,), finish_reason="stop")

    return script


def test_an_answer_is_seen_while_it_is_made(browser: Browser) -> None:
    """The words are there as they come; the note counts them; the next question has them all."""
    engine = FakeEngine()
    engine.script = pausing(engine)
    with chat(browser, engine) as page:
        expect(page.locator("#model")).to_have_text("fake/model")
        ask(page, "count")
        answer = page.locator(".turn:not(.user)").last
        expect(answer).to_have_text("one two ")
        expect(page.get_by_role("button", name="Send")).to_be_hidden()
        engine.release()
        expect(answer).to_have_text("one two three")
        expect(page.locator(".note").last).to_contain_text("3 tokens")
        expect(page.locator(".note").last).to_contain_text("tok/s")
        expect(page.locator(".user")).to_have_text("count")
        engine.script = scripted(Piece("yes", (1,), finish_reason="stop"))
        ask(page, "again")
        expect(answer).to_have_text("yes")
    for words in ("count", "one two three", "again"):
        assert words in sent(engine, 1)


def test_the_stop_button_stops_and_aborts(browser: Browser) -> None:
    """C64 from the page: the engine is told, the words so far stay and count as the answer."""
    engine = FakeEngine(endless, step_delay=0.01, max_model_len=100_000)
    with chat(browser, engine) as page:
        ask(page, "talk")
        expect(page.locator(".turn").last).to_contain_text("on and on and")
        page.get_by_role("button", name="Stop").click()
        expect(page.locator(".note").last).to_contain_text("stopped")
        wait_until(lambda: engine.aborted == [0])
        assert engine.num_live == 0
        expect(page.get_by_role("button", name="Stop")).to_be_hidden()
        said = page.locator(".turn").last.inner_text()
        ask(page, "why")
        wait_until(lambda: len(engine.submitted) == 2)
        assert said.strip() in sent(engine, 1)
        page.get_by_role("button", name="Clear").click()
        expect(page.locator(".turn")).to_have_count(0)
        wait_until(lambda: engine.aborted == [0, 1])


def test_html_stays_text(browser: Browser) -> None:
    """What a model or a person writes is shown letter for letter, and runs nothing."""
    engine = FakeEngine(scripted(Piece(HTML, (1,), finish_reason="stop")))
    with chat(browser, engine) as page:
        ask(page, HTML)
        expect(page.locator(".turn:not(.user)")).to_have_text(HTML)
        expect(page.locator(".user")).to_have_text(HTML)
        expect(page.locator("#log b, #log img, #log script")).to_have_count(0)
        expect(page).to_have_title("Octavo")


def test_errors_are_shown_and_nothing_typed_is_lost(browser: Browser) -> None:
    """Before the first word the question comes back to be sent again; later the words stay."""
    engine = FakeEngine(scripted(Piece("so far", (1,)), Piece(error="the engine stopped")))
    engine.submit_error = QueueFull("4 requests are waiting: try again later")
    with chat(browser, engine) as page:
        ask(page, "anyone there?")
        expect(page.locator(".error")).to_have_text("4 requests are waiting: try again later")
        expect(page.locator(".error")).to_be_in_viewport()
        expect(page.get_by_label("Message")).to_have_value("anyone there?")
        engine.submit_error = None
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".error").last).to_have_text("the engine stopped")
        expect(page.locator(".turn:not(.user):not(.error)")).to_have_text("so far")
        expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_key_is_asked_for_when_the_server_has_one(browser: Browser) -> None:
    """C101 from the page: without the key an error, with it an answer."""
    engine = FakeEngine(scripted(Piece("welcome", (1,), finish_reason="stop")))
    with live_server(engine, api_key="open sesame") as server, open_page(browser, server) as page:
        ask(page, "let me in")
        expect(page.locator(".error")).to_contain_text("API key")
        page.get_by_label("API key").fill("open sesame")
        page.get_by_role("button", name="Send").click()
        expect(page.locator(".turn").last).to_have_text("welcome")
        expect(page.locator("#model")).to_have_text("fake/model")
        assert len(engine.submitted) == 1


def test_the_page_fits_a_phone(browser: Browser) -> None:
    """Nothing is wider than the screen, whatever is said, and every control can be reached."""
    engine = FakeEngine(scripted(Piece("w" * 500, (1,), finish_reason="stop")))
    with chat(browser, engine) as page:
        page.set_viewport_size({"width": PHONE_WIDTH, "height": 844})
        ask(page, "x" * 100)
        expect(page.locator(".turn:not(.user)")).to_have_text("w" * 500)
        for name in ("Message", "Temperature", "Max tokens"):
            expect(page.get_by_label(name)).to_be_in_viewport(ratio=1)
        expect(page.get_by_role("button", name="Send")).to_be_in_viewport(ratio=1)
        widths = page.evaluate(
            "() => [...document.querySelectorAll('html, #log')].map((x) => x.scrollWidth)"
        )
        assert max(widths) <= PHONE_WIDTH
