"""The page at `/`: its HTML, and what it does in Chromium with a real server behind it."""

import base64
import hashlib
import re
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from subquad.models import LanguageModel
from subquad.serve import server
from subquad.serve.page import page, policy
from subquad.serve.settings import ServeSettings
from tests.report.browser import needs_chromium
from tests.serve.browser import Browser

KEY = "sk-page"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


class Reading(HTMLParser):
    """The elements of a page, with the label that each input is in or has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.named: set[str | None] = set()  # ids that labels are for
        self.inside: set[int] = set()  # elements in a label
        self.depth = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "label":
            self.depth += 1
            self.named.add(given.get("for"))
        if self.depth:
            self.inside.add(len(self.elements))
        self.elements.append((tag, given))

    def handle_endtag(self, tag: str) -> None:
        self.depth -= tag == "label"


def reading() -> Reading:
    read = Reading()
    read.feed(page())
    return read


def test_every_input_has_a_label() -> None:
    read, inputs = reading(), 0
    for number, (tag, given) in enumerate(read.elements):
        if tag in ("input", "select", "textarea"):
            inputs += 1
            assert number in read.inside or given.get("id") in read.named, given
    assert inputs == 9
    assert read.depth == 0


def test_the_script_finds_every_element_that_it_names() -> None:
    ids = [given["id"] for _, given in reading().elements if "id" in given]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'\$\("([\w-]+)"\)', page()))
    assert len(used) > 20
    assert used <= set(ids)


def test_it_loads_nothing_and_runs_under_its_policy() -> None:
    for tag, given in reading().elements:
        assert given.get("href", given.get("src", "")) in ("", "/", "/metrics", "data:,"), given
        # a strict policy forbids both
        assert "style" not in given, (tag, given)
        assert not any(name.startswith("on") for name in given), (tag, given)
    said = dict(part.split(" ", 1) for part in policy().split("; "))
    assert said["default-src"] == "'none'"
    assert said["connect-src"] == "'self'"
    assert "unsafe" not in policy()
    for kind, count in (("style", 1), ("script", 2)):
        texts = re.findall(rf"<{kind}>(.*?)</{kind}>", page(), re.DOTALL)
        assert len(texts) == count
        hashes = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts]
        assert said[f"{kind}-src"].split() == [f"'sha256-{found}'" for found in hashes]


class Served:
    """A real server in a thread of this process."""

    def __init__(self, folder: Path, **options: Any):
        self.service = server.make_service(str(folder), ServeSettings(device="cpu", slots=4, **options))
        self.server = server.Server(self.service, drain=0.0)
        listener = server._listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.thread = threading.Thread(target=self.server.run, kwargs={"sockets": [listener]})
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join()


def save_writer(folder: Path, mechanism: str) -> None:
    """A model that writes visible characters, and never ends."""
    torch.manual_seed(0)
    model = LanguageModel(vocab=256, dim=16, depth=2, heads=2, mechanism=mechanism, positions="none")
    with torch.no_grad():
        model.head.bias[:32] = model.head.bias[127:] = -100
    model.save(folder)


@pytest.fixture(scope="module")
def writer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models") / "writer"
    save_writer(folder, "linear, softmax")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGE_KEYS", KEY)
        served = Served(folder, api_key_env="PAGE_KEYS", capacity=3000)
    yield served
    served.stop()


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "painter"
    fields: dict[str, Any] = {"dim": 16, "depth": 1, "heads": 2, "mechanism": "linear", "positions": "waves"}
    LanguageModel(vocab=9, shape=(5, 4, 3), max_length=60, **fields).save(folder)
    served = Served(folder)
    yield served
    served.stop()


TEXT = "document.getElementById('{}').textContent"
IDLE = "!document.getElementById('start').disabled"


def text(browser: Browser, name: str) -> str:
    found: str = browser.run(TEXT.format(name))
    return found


FAINT = """(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const light = (colour) => {
    const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [r, g, b] = parts(colour).map((v) => linear(v / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (e) => {
    const colour = getComputedStyle(e).backgroundColor;
    return (parts(colour)[3] ?? 1) > 0 || !e.parentElement ? colour : behind(e.parentElement);
  };
  const words = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const written = (e) => words(e) || e.matches("input, textarea, select");
  const shown = [...document.querySelectorAll("body *")].filter((e) => e.offsetParent && written(e) && !e.disabled);
  return shown.map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(behind(e))];
    return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.outerHTML.slice(0, 80)];
  }).filter(([contrast]) => contrast < 4.5);
})()"""


def fits(browser: Browser) -> bool:
    """Whether nothing has to be scrolled sideways, no word is cut off, and all can be read: WCAG's contrast of 4.5."""
    assert browser.run(FAINT) == []
    wide = "[...document.querySelectorAll('main *')].filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"
    odd = browser.run(f"{wide}.map(e => e.outerHTML.slice(0, 80))")
    assert odd == [], odd
    return bool(browser.run("document.documentElement.scrollWidth <= innerWidth"))


@needs_chromium
@pytest.mark.parametrize(("width", "dark"), [(390, True), (1100, False)])
def test_a_visitor_writes_and_chats(writer: Served, tmp_path: Path, width: int, dark: bool) -> None:
    with Browser(tmp_path / "profile", width=width, dark=dark) as browser:
        browser.open(writer.url)
        browser.until("!document.getElementById('door').hidden")  # the field for the key has the focus
        assert text(browser, "problem") == "This server asks for an API key."
        for key, outcome in (("sk-wrong", "/^a valid API key is missing/.test({})"), (KEY, "{} === 'writer'")):
            browser.type(key)
            browser.press("Enter")
            browser.until(outcome.format(TEXT.format("problem" if key != KEY else "name")))
        assert browser.run("document.getElementById('problem').hidden")
        assert "linear, softmax" in text(browser, "about")
        assert "3,000 tokens" in text(browser, "about")
        assert fits(browser)
        paper = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (paper == "rgb(21, 23, 27)") == dark

        # write, with the keyboard alone
        browser.run("document.getElementById('prompt').focus()")
        browser.type("Once upon a time. " * 30)
        browser.press("Enter", ctrl=True)
        browser.until(f"{TEXT.format('cached')} !== '–' && {IDLE}")
        written = text(browser, "text")
        assert written.startswith("Once upon a time. " * 30)
        assert len(written) == 540 + 256
        assert text(browser, "status") == "The end: 256 tokens, as asked."
        assert text(browser, "made") == "256"
        assert text(browser, "cached").endswith("of 540")
        assert re.fullmatch(r"[\d,.]+ ms", text(browser, "first"))
        assert float(text(browser, "speed").replace(",", "")) > 0
        one, two = (browser.run(f"document.getElementById('{bar}-bar').clientWidth") for bar in ("state", "cache"))
        assert 0 < one < two  # a layer of two grows
        assert text(browser, "cache") == f"{2 * 2 * 16 * 4 * 796 / 1000:.0f} kB"
        assert fits(browser)

        # what was written is the next prompt, and most of it is known
        browser.click("#more")
        browser.press("Enter", ctrl=True)
        browser.until(f"{TEXT.format('cached')} === '512 of 796' && {IDLE}")

        # errors in words, at the same place; the text is still there
        browser.run("document.querySelector('[name=max_tokens]').value = 2999")
        browser.click("#start")
        browser.until("!document.getElementById('problem').hidden")
        assert re.match(r"max_tokens=2999 cannot work with a prompt of 796 tokens", text(browser, "problem"))
        assert browser.run("document.getElementById('prompt').value.length") == 796
        assert fits(browser)

        # Escape stops, and the server notices
        browser.run("document.querySelector('[name=max_tokens]').value = 2000")
        browser.click("#start")
        browser.until(f"Number({TEXT.format('made')}.replace(',', '')) > 5")
        browser.press("Escape")
        browser.until(f"{TEXT.format('status')} === 'Stopped.' && {IDLE}")
        assert int(text(browser, "made").replace(",", "")) < 2000
        browser.until(f"{TEXT.format('server')}.startsWith('The server: 0 streams now, 0 waiting. Its prefix cache')")

        # the server is asked while it writes; what is measured begins anew; an early stop leaves the earlier result
        browser.run("document.querySelector('[name=max_tokens]').value = 2000")
        running = f"{TEXT.format('server')}.startsWith('The server: 1 stream now')"
        browser.run(
            "window.first = null; document.getElementById('start').addEventListener('click', () => setTimeout(() => {"
            " window.first = ['made', 'first', 'speed', 'cached'].map(i => document.getElementById(i).textContent);"
            " }, 0), {once: true})"
        )
        browser.click("#start")
        browser.until("window.first")
        assert browser.run("window.first") == ["0", "–", "–", "–"]
        browser.until(f"{running} || {IDLE}")
        assert browser.run(f"!({IDLE})")
        browser.press("Escape")
        browser.until(IDLE)
        earlier, made = text(browser, "text"), text(browser, "made")
        assert len(earlier) > 796
        browser.run("document.getElementById('start').click(); document.getElementById('stop').click()")
        browser.until(f"{TEXT.format('status')} === 'Stopped.' && {IDLE}")
        assert (text(browser, "text"), text(browser, "made")) == (earlier, made)
        assert not browser.run("document.getElementById('result').hidden || document.getElementById('figures').hidden")

        # a chat of two turns: the second one has the first before it
        browser.click("input[value=chat]")
        browser.run("document.querySelector('[name=max_tokens]').value = 5")
        for message, turns in (("Hello.", 2), ("And you?", 4)):
            browser.run("document.getElementById('prompt').value = ''; document.getElementById('prompt').focus()")
            browser.type(message)
            browser.press("Enter", ctrl=True)
            browser.until(f"document.querySelectorAll('.turn').length === {turns} && {IDLE}")
        said = browser.run("[...document.querySelectorAll('.turn')].map(e => [...e.children].map(c => c.textContent))")
        assert [who for who, _ in said] == ["you", "model"] * 2
        assert [what for who, what in said if who == "you"] == ["Hello.", "And you?"]
        assert all(len(what) == 5 for who, what in said if who == "model")
        before = len(f"user: Hello.\nassistant: {said[1][1]}\nuser: And you?\n")
        assert text(browser, "cached") == f"0 of {before}"
        assert fits(browser)
        # nothing but the answers that were refused
        assert [re.findall("[0-9]+", problem) for problem in browser.problems] == [["401"], ["401"], ["400"]]
        assert {url.partition("/")[0] + "//" + url.split("/")[2] for url in browser.requests} == {writer.url}


@needs_chromium
def test_a_visitor_draws(painter: Served, tmp_path: Path) -> None:
    """The canvases hold the very tokens that another client gets for the same seed."""
    body = {"prompt": "", "n": 4, "max_tokens": 60, "temperature": 1, "top_p": 0.9, "seed": 7}
    expected = [choice["tokens"] for choice in httpx.post(f"{painter.url}/v1/completions", json=body).json()["choices"]]
    with Browser(tmp_path / "profile", width=390) as browser:
        browser.open(painter.url)
        browser.until("!document.getElementById('ask').hidden")
        assert browser.run("document.getElementById('words').hidden && document.getElementById('modes').hidden")
        browser.run("const f = document.getElementById('ask').elements; f.seed.value = 7; f.top_p.value = 0.9")
        browser.click("#start")
        browser.until(f"{TEXT.format('status')} === 'All pixels are drawn.' && {IDLE}")
        drawn = browser.run(
            "[...document.querySelectorAll('canvas')].map(c => "
            "[...c.getContext('2d').getImageData(0, 0, c.width, c.height).data])"
        )
        assert len(drawn) == 4
        for pixels, tokens in zip(drawn, expected, strict=True):
            assert [value for n, value in enumerate(pixels) if n % 4 < 3] == [round(255 * t / 7 + 1e-9) for t in tokens]
            assert set(pixels[3::4]) == {255}
        labels = browser.run("[...document.querySelectorAll('canvas')].map(c => c.getAttribute('aria-label'))")
        assert labels == [f"image {n} of 4, complete" for n in range(1, 5)]
        assert text(browser, "made") == "240"
        assert fits(browser)
        assert browser.problems == []


@needs_chromium
def test_a_visitor_is_told_that_the_server_is_gone(tmp_path: Path) -> None:
    save_writer(tmp_path / "m", "linear")
    served = Served(tmp_path / "m")
    with Browser(tmp_path / "profile") as browser:
        browser.open(served.url)
        browser.until("!document.getElementById('ask').hidden")
        browser.run("document.querySelector('[name=max_tokens]').value = 1000000")
        browser.click("#start")
        browser.until(f"Number({TEXT.format('made')}.replace(',', '')) > 5")
        served.stop()
        browser.until("!document.getElementById('problem').hidden")
        # whichever comes first: the server's last words, or the end of the connection
        assert re.search("shutting down|before the answer was complete", text(browser, "problem"))
        browser.click("#start")
        browser.until(f"{TEXT.format('problem')}.startsWith('The server cannot be reached') && {IDLE}")
