"""The catalogue's pages in a real browser: from the disk and from a web server, on a phone, in the dark, without
JavaScript.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from support import catalog_samples
from support.catalog_samples import HOSTILE

pytestmark = pytest.mark.covers("ekiben/publish")

CHROMIUM = shutil.which("chromium")
IMAGE = "images/lora-opencalm.html"
# Of every text: its colour against the first background behind it that is not transparent (WCAG 2, contrast ratio).
CONTRASTS = """() => {
  const parse = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => {
    const [r, g, b] = parse(color).map(c => (c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const element = walk.currentNode.parentElement;
    if (!walk.currentNode.textContent.trim() || element.matches("script, style, svg *")) continue;
    let behind = element, color = "";
    do { color = getComputedStyle(behind).backgroundColor; behind = behind.parentElement; }
    while (behind && (parse(color)[3] ?? 1) === 0);
    const [one, other] = [light(getComputedStyle(element).color), light(color)].sort();
    found.push([(other + 0.05) / (one + 0.05), walk.currentNode.textContent.trim().slice(0, 40)]);
  }
  return found;
}"""


@dataclass
class Visit:
    """A page and all that was heard of it."""

    page: Page
    heard: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (tests/services.sh install browser)")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Any]:
    made = []

    def begin(**options: Any) -> Visit:
        context = browser.new_context(**options)
        made.append(context)
        found = Visit(context.new_page())
        found.page.on("console", lambda message: found.heard.append(message.text))
        found.page.on("pageerror", lambda error: found.heard.append(str(error)))
        found.page.on("dialog", lambda dialog: (found.heard.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        found.page.on("request", lambda request: found.asked.append(request.url))
        return found

    yield begin
    for context in made:
        context.close()


@pytest.fixture(scope="module")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("the lab")
    catalog_samples.write(folder / "catalog")
    catalog_samples.write(folder / "hostile", HOSTILE)
    return folder


@pytest.fixture(scope="module", params=["file", "http"])
def root(request: pytest.FixtureRequest, shared_dir: Path) -> Iterator[str]:
    if request.param == "file":
        yield shared_dir.as_uri()
        return
    argv = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(shared_dir)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout
            port = re.search(r"port (\d+)", server.stdout.readline())
            assert port
            yield f"http://127.0.0.1:{port[1]}"
        finally:
            server.terminate()


def column(page: Page, title: str) -> list[str]:
    heads = page.locator("#runs-table thead th").all_inner_texts()
    at = next(number for number, head in enumerate(heads, 1) if head.startswith(title))
    return page.locator(f"#runs-table tbody tr > :nth-child({at})").all_inner_texts()


@pytest.mark.guard
def test_from_the_list_to_an_image_and_its_runs_in_order(visit: Any, root: str) -> None:
    seen = visit()
    page = seen.page
    page.goto(f"{root}/catalog/index.html")
    page.get_by_role("link", name="lora-opencalm").click()
    page.wait_for_url(f"**/{IMAGE}")
    assert page.title().startswith("lora-opencalm")
    assert column(page, "Tokens/s") == ["410", "141,000", "9,200", "19,500"]  # the newest first
    head = page.get_by_role("columnheader", name="Tokens/s")
    for order, wanted in (
        ("descending", ["141,000", "19,500", "9,200", "410"]),
        ("ascending", ["410", "9,200", "19,500", "141,000"]),
    ):
        head.get_by_role("button").click()
        assert column(page, "Tokens/s") == wanted
        assert head.get_attribute("aria-sort") == order
        assert page.locator("#runs-table [aria-sort]").count() == 1
    mfu = page.get_by_role("columnheader", name="MFU").get_by_role("button")
    mfu.focus()
    for wanted in (["45.0 %", "41.0 %", "22.0 %", "–"], ["22.0 %", "41.0 %", "45.0 %", "–"]):
        page.keyboard.press("Enter")
        assert column(page, "MFU") == wanted
    page.get_by_role("columnheader", name="Model").get_by_role("button").click()
    assert [text.split()[0] for text in column(page, "Model")] == [
        "cyberagent/open-calm-3b",
        "cyberagent/open-calm-7b",
        "cyberagent/open-calm-small",
        "gpt2",
    ]
    older = page.locator(f"details[id='lora-opencalm-1.0-{'1' * 12}']")
    assert older.get_attribute("open") is None
    page.locator("a", has_text=f"lora-opencalm-1.0-{'1' * 12}").first.click()
    expect(older).to_have_attribute("open", "")  # waits: hashchange comes after the click is over
    assert seen.heard == []
    assert [url for url in seen.asked if not url.startswith((f"{root}/catalog/", "data:,"))] == []


@pytest.mark.parametrize("name", ["index.html", IMAGE])
def test_on_a_phone_only_tables_scroll(visit: Any, shared_dir: Path, name: str) -> None:
    for folder in ("catalog", "hostile"):
        page = visit(viewport={"width": 375, "height": 800}).page
        page.goto((shared_dir / folder / name).as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert page.evaluate("document.documentElement.scrollWidth") == 375
        wide = page.evaluate("""() => [...document.querySelectorAll("main *, footer *")]
            .filter(one => !one.closest(".scroll, .hidden, svg") && one.getBoundingClientRect().right > 375.5)
            .map(one => one.outerHTML.slice(0, 80))""")
        assert wide == []
        assert page.locator(".scroll table").count() == page.locator("table").count() > 0


@pytest.mark.parametrize("width", [1280, 1920])
def test_tables_fit_desktop_width(visit: Any, shared_dir: Path, width: int) -> None:
    page = visit(viewport={"width": width, "height": 900}).page
    for name in ("index.html", IMAGE):
        page.goto((shared_dir / "catalog" / name).as_uri())
        page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        cut = page.evaluate("""() => [...document.querySelectorAll(".scroll")]
            .filter(one => one.scrollWidth > one.clientWidth).map(one => one.getAttribute("aria-label"))""")
        assert cut == []


@pytest.mark.parametrize("scheme", ["dark", "light"])
@pytest.mark.parametrize("name", ["index.html", IMAGE])
def test_every_text_has_enough_contrast(visit: Any, shared_dir: Path, name: str, scheme: str) -> None:
    page = visit(color_scheme=scheme).page
    page.goto((shared_dir / "catalog" / name).as_uri())
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", dark)[:3])) < 150) == (scheme == "dark")
    found = page.evaluate(CONTRASTS)
    assert len(found) > 30
    assert [item for item in found if item[0] < 4.5] == []


def test_pages_are_complete_without_javascript(visit: Any, shared_dir: Path) -> None:
    page = visit(java_script_enabled=False).page
    page.goto((shared_dir / "catalog" / IMAGE).as_uri())
    assert column(page, "Tokens/s") == ["410", "141,000", "9,200", "19,500"]
    assert page.get_by_role("button").count() == 0
    assert page.locator("figure").count() == 2
    older = page.locator("details.version").last
    older.locator("summary").click()
    assert older.get_by_text("sha256").first.is_visible()


def test_tables_have_captions_and_header_scopes(visit: Any, shared_dir: Path) -> None:
    for name in ("index.html", IMAGE):
        page = visit().page
        page.goto((shared_dir / "catalog" / name).as_uri())
        assert page.locator("table").count() == page.locator("table > caption").count() > 0
        assert page.locator("th:not([scope])").count() == 0
        assert page.locator("h1").count() == 1
        ids = page.evaluate("[...document.querySelectorAll('[id]')].map(one => one.id)")
        assert len(ids) == len(set(ids))
        assert page.evaluate(
            "[...document.querySelectorAll('a[href^=\"#\"]')].every(one => document.getElementById(one.hash.slice(1)))"
        )


def test_hostile_texts_are_not_executed(visit: Any, root: str) -> None:
    seen = visit()
    page = seen.page
    for name in ("index.html", IMAGE, "images/x%3Cb%3E%22y%27%26z.html"):
        page.goto(f"{root}/hostile/{name}")
        assert page.locator("img").count() == 0
        assert page.locator("script").count() == 1
        assert HOSTILE in page.locator("body").inner_text()
        for button in page.get_by_role("button").all():
            button.click()
    assert seen.heard == []
    assert [url for url in seen.asked if not url.startswith((f"{root}/hostile/", "data:,"))] == []


def test_content_security_policy_blocks_unescaped_scripts(visit: Any, shared_dir: Path) -> None:
    """The second wall: a page into which somebody wrote a script, a picture and a handler."""
    whole = (shared_dir / "catalog" / IMAGE).read_text()
    bad = (
        '<script>alert(1)</script><img src="https://example.org/x.png" onerror="alert(2)"><a id="bad"'
        ' onclick="alert(3)" href="#run">x</a>'
    )
    (shared_dir / "catalog" / "edited.html").write_text(whole.replace("</main>", f"{bad}</main>"))
    seen, failed = visit(), []
    seen.page.on("requestfailed", lambda request: failed.append(request.failure))
    seen.page.goto((shared_dir / "catalog" / "edited.html").as_uri())
    seen.page.locator("#bad").click()
    assert not any(event.startswith("dialog") for event in seen.heard)
    assert len([event for event in seen.heard if "Content Security Policy" in event]) >= 3
    assert failed == ["csp"]
