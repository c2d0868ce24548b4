"""The chat page in a real browser: what a person types, reads, stops, and is told when it fails."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from servekit.core.request import FinishReason
from server.fake_engine import EOS, MAX_MODEL_LEN, LiveServer, Script, live_server, tokens

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync")
PATIENCE_MS = 20_000
"""How long a test waits for what must appear; only a failure takes that long."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser of this machine, without a window; the tests are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="install it with pip install playwright")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip("there is no Chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Browser, server: LiveServer) -> Iterator[Page]:
    """The page of the shared server; nothing may go wrong in its script, and it loads nothing from elsewhere."""
    page = browser.new_page()
    failures: list[object] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: failures.append(error))
    page.on("request", lambda request: asked.append(request.url))
    page.set_default_timeout(PATIENCE_MS)
    page.goto(server.url)
    yield page
    page.close()
    assert failures == []
    assert all(url.startswith((server.url, "data:")) for url in asked)


def ask(page: Page, text: str) -> None:
    """Type a question and press Enter."""
    page.get_by_label("question").fill(text)
    page.get_by_label("question").press("Enter")


def wait_for(page: Page, selector: str, text: str | re.Pattern[str]) -> None:
    """Wait until the last element of that kind shows `text`."""
    page.locator(selector).filter(has_text=text).last.wait_for()


def test_it_says_which_model_answers(page: Page) -> None:
    wait_for(page, "#model", "fake")
    wait_for(page, "#status", f"context {MAX_MODEL_LEN} tokens")
    assert page.title() == "fake"


def test_words_appear_as_they_come(page: Page, server: LiveServer) -> None:
    """While the answer grows the button stops it; what has come is shown before the end."""
    server.engine.script = lambda _: Script([*tokens("Paris is the capital."), EOS], delay_s=0.1)
    ask(page, "What is the capital of France?")
    wait_for(page, ".user", "What is the capital of France?")
    wait_for(page, ".assistant.running span", re.compile(r"^Par"))
    assert "capital." not in page.locator(".assistant span").inner_text()
    assert page.get_by_role("button", name="stop").is_visible()
    wait_for(page, ".assistant:not(.running) span", re.compile(r"^Paris is the capital\.$"))
    wait_for(page, ".assistant small", re.compile(
        r"^\d+ prompt and 22 output tokens · first after \d+ ms · then [\d.]+ tokens/s$"))
    assert page.get_by_role("button", name="send").is_visible()
    assert page.get_by_label("question").input_value() == ""


def test_a_conversation_goes_on(page: Page, server: LiveServer) -> None:
    server.engine.script = lambda _: Script([*tokens("Paris."), EOS])
    ask(page, "And France?")
    wait_for(page, ".assistant:not(.running) span", "Paris.")
    ask(page, "Sure?")
    server.wait_until(lambda: len(server.engine.submitted) == 2)
    prompt = server.service.serving.model.tokenizer.decode(server.engine.submitted[1].prompt_token_ids, False)
    assert prompt.endswith("user\nAnd France?\n<|turn|>assistant\nParis.\n<|turn|>user\nSure?\n<|turn|>assistant\n")
    page.get_by_role("button", name="new chat").click()
    assert page.locator(".turn").count() == 0
    ask(page, "Hello")
    server.wait_until(lambda: len(server.engine.submitted) == 3)
    prompt = server.service.serving.model.tokenizer.decode(server.engine.submitted[2].prompt_token_ids, False)
    assert "France" not in prompt


def test_an_answer_can_be_stopped(page: Page, server: LiveServer) -> None:
    """The engine stops too; what had come stays part of the conversation."""
    server.engine.script = lambda _: Script([*tokens("never "), *tokens("ends ")], delay_s=0.02)
    ask(page, "Tell me everything")
    wait_for(page, ".assistant.running span", "never")
    page.get_by_role("button", name="stop").click()
    wait_for(page, ".assistant:not(.running) small", "stopped")
    server.wait_until(lambda: len(server.engine.aborted) == 1)
    server.engine.script = lambda _: Script([*tokens("Fine."), EOS])
    ask(page, "Enough")
    wait_for(page, ".assistant:not(.running) span", "Fine.")
    prompt = server.service.serving.model.tokenizer.decode(server.engine.submitted[1].prompt_token_ids, False)
    assert "<|turn|>assistant\nnever " in prompt


def test_a_new_chat_stops_the_old_one(page: Page, server: LiveServer) -> None:
    server.engine.script = lambda _: Script(tokens("never ends "), delay_s=0.02)
    ask(page, "Tell me everything")
    wait_for(page, ".assistant.running span", "never")
    page.get_by_role("button", name="new chat").click()
    server.wait_until(lambda: len(server.engine.aborted) == 1)
    page.get_by_role("button", name="send").wait_for()
    server.engine.script = lambda _: Script([*tokens("Hi."), EOS])
    ask(page, "Hello")
    wait_for(page, ".assistant:not(.running) span", "Hi.")
    prompt = server.service.serving.model.tokenizer.decode(server.engine.submitted[1].prompt_token_ids, False)
    assert "Tell me" not in prompt and "never" not in prompt


@pytest.mark.parametrize("script", [
    Script(refusal=FinishReason.queue_full, message="1024 requests are waiting; try again later"),
    Script(tokens("half an answ"), fail_after=3, message="1024 requests are waiting; try again later")],
    ids=["before the answer", "within it"])
def test_an_error_is_told_in_words(page: Page, server: LiveServer, script: Script) -> None:
    """As large as the answers, in view; a question that got nothing can be sent again."""
    server.engine.script = lambda _: script
    ask(page, "Are you there?")
    wait_for(page, ".assistant:not(.running) p", "1024 requests are waiting; try again later")
    shown = page.locator(".assistant p")
    size = "element => getComputedStyle(element).fontSize"
    assert shown.evaluate(size) == page.locator(".assistant span").evaluate(size)
    box = shown.bounding_box()
    assert box is not None and box["width"] > 200 and box["height"] > 20
    question = page.get_by_label("question").input_value()
    assert question == ("" if script.fail_after else "Are you there?")


def test_a_server_that_is_gone_is_told_too(page: Page) -> None:
    wait_for(page, "#model", "fake")
    page.context.set_offline(True)
    ask(page, "Are you there?")
    wait_for(page, ".assistant p", "the server cannot be reached")


def test_an_answer_cut_off_says_so(page: Page, server: LiveServer) -> None:
    page.get_by_label("max tokens").fill("5")
    ask(page, "Hello")
    wait_for(page, ".assistant small", "cut off at the limit")
    assert server.engine.submitted[0].sampling.max_tokens == 5
    assert page.locator(".assistant span").inner_text() == "hello"


def test_markup_in_an_answer_is_text(page: Page, server: LiveServer) -> None:
    text = "<b>bold</b><script>document.title = 'taken over'</script>"
    server.engine.script = lambda _: Script([*tokens(text), EOS])
    ask(page, "<i>Hello</i>")
    wait_for(page, ".assistant:not(.running) span", text)
    assert page.locator(".turn b, .turn i, .turn script").count() == 0
    assert page.title() == "fake"


def test_enter_sends_and_shift_enter_breaks_the_line(page: Page, server: LiveServer) -> None:
    box = page.get_by_label("question")
    box.press("Enter")
    box.type("one")
    box.press("Shift+Enter")
    box.type("two")
    assert (box.input_value(), len(server.engine.submitted)) == ("one\ntwo", 0)
    box.press("Enter")
    server.wait_until(lambda: len(server.engine.submitted) == 1)


def test_a_key_can_be_given(browser: Browser) -> None:
    with live_server(api_key="s3cret") as server:
        page = browser.new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(server.url)
        wait_for(page, "#status.wrong", "a valid API key is required")
        page.get_by_label("API key").fill("s3cret")
        page.get_by_label("API key").press("Tab")
        wait_for(page, "#status:not(.wrong)", f"context {MAX_MODEL_LEN} tokens")
        ask(page, "Hello")
        wait_for(page, ".assistant span", "hello world")
        page.close()
