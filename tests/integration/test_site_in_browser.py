"""The documents' site in Chromium: widths of all pages, search, copy buttons, dark colours, charts; from a disk and a
server.
"""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from support.docs_site import build_site

pytestmark = pytest.mark.covers("docs", "mkdocs.yml", "bench/picture.py", "requirements-dev.lock")

CHROMIUM = shutil.which("chromium")
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PHONE, DESKTOP = {"width": 390, "height": 844}, {"width": 1280, "height": 800}
# Elements that reach beyond the window, unless they scroll in an element of their own.
BEYOND = """() => [...document.querySelectorAll(".md-content *")].filter(element => {
  const box = element.getBoundingClientRect();
  if (!box.width || box.right <= innerWidth + 1) return false;
  for (let above = element.parentElement; above && !above.matches(".md-content"); above = above.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(above).overflowX)) return false;
  return true;
}).map(element => `${element.tagName} ${element.textContent.trim().slice(0, 40)}`)"""
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LIGHT_PAGE, DARK_PAGE = "rgb(255, 255, 255)", "rgb(30, 33, 41)"

OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def addresses(site: Path) -> Iterator[dict[str, str]]:
    """Yield the address of the site on the disk and on a web server of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(QuietHandler, directory=str(site))) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield {"disk": site.as_uri(), "server": f"http://127.0.0.1:{server.server_port}"}
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed (tests/services.sh install browser)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Browser, addresses: dict[str, str]) -> Iterator[OpenPage]:
    """Yield a function that opens a page. The test fails when a page asks another host, or reports an error."""
    contexts, problems = [], list[str]()

    def check_request(url: str) -> None:
        if not url.startswith((*addresses.values(), "data:")):
            problems.append(f"request of {url}")

    def open_page(name: str, kind: str = "disk", **options: Any) -> Page:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda request: check_request(request.url))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"{addresses[kind]}/{name}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert problems == []


@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_no_page_scrolls_sideways(site: Path, open_page: OpenPage, size: dict[str, int]) -> None:
    names = [str(path.relative_to(site)) for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    assert len(names) > 40
    page = open_page(names[0], viewport=size)
    widths = {}
    for name in names:
        page.goto(f"{site.as_uri()}/{name}")
        page.evaluate("document.querySelectorAll('article details').forEach(details => { details.open = true; })")
        width = page.evaluate("document.documentElement.scrollWidth")
        widths[name] = width, page.locator("h1").count(), page.evaluate(BEYOND)
    assert {name: measured for name, measured in widths.items() if measured != (size["width"], 1, [])} == {}


def test_a_wide_table_scrolls_without_the_page(open_page: OpenPage) -> None:
    page = open_page("support-matrix.html", viewport=PHONE)
    box = page.locator(".md-typeset__scrollwrap").first
    inner, outer = box.evaluate("element => [element.scrollWidth, element.clientWidth]")
    assert inner > outer
    box.evaluate("element => element.scrollTo(1000, 0)")
    assert box.evaluate("element => element.scrollLeft") > 0
    last = page.locator("table").first.locator("th").last.bounding_box()
    assert last is not None
    assert last["x"] + last["width"] <= PHONE["width"]


def test_the_support_matrix_begins_with_a_table_that_fits_on_a_screen(open_page: OpenPage) -> None:
    page = open_page("support-matrix.html", viewport=DESKTOP)
    table = page.locator("table").first.bounding_box()
    assert table is not None
    assert table["y"] + table["height"] <= DESKTOP["height"]
    assert page.locator("table:visible").count() == 2  # and that of the known failures
    page.locator("summary", has_text="Recipes, one by one").click()
    expect(page.get_by_text("gpt-neo untested")).to_be_visible()


@pytest.mark.parametrize("kind", ["disk", "server"])
@pytest.mark.parametrize("size", [PHONE, DESKTOP], ids=["phone", "desktop"])
def test_search_finds_a_word(open_page: OpenPage, kind: str, size: dict[str, int]) -> None:
    page = open_page("index.html", kind, viewport=size)
    if size is PHONE:
        page.locator("label[for=__search].md-header__button").click()
    page.locator("input.md-search__input").click()
    page.keyboard.type("squashfs")
    result = page.locator(".md-search-result__link", has_text="Store and SIF").first
    result.click()
    expect(page).to_have_title("Store and SIF - Ekiben")
    expect(page.locator("article mark").first).to_have_text("squashfs")


@pytest.mark.parametrize("kind", ["disk", "server"])
def test_the_copy_button_copies_the_block(open_page: OpenPage, kind: str) -> None:
    page = open_page("tutorials/first-image.html", kind)
    block = page.locator("article pre").first
    block.locator("xpath=..").locator("button.md-code__button").first.click()
    expect(page.get_by_text("Copied to clipboard")).to_be_visible()
    page.locator(".md-header [data-md-component=search] input").click()
    page.keyboard.press("Control+V")
    expect(page.locator("input.md-search__input")).to_have_value("make image recipe=hello")


def test_every_code_block_has_a_copy_button(site: Path, open_page: OpenPage) -> None:
    page = open_page("how-to/docker.html")
    page.locator("button.md-code__button").first.wait_for()
    assert page.locator("article pre > code").count() == page.locator("button.md-code__button").count() > 3


@pytest.mark.parametrize(("scheme", "background"), [("light", LIGHT_PAGE), ("dark", DARK_PAGE)])
def test_colours_follow_the_system(open_page: OpenPage, scheme: str, background: str) -> None:
    page = open_page("index.html", color_scheme=scheme)
    assert page.evaluate(BACKGROUND) == background
    page.emulate_media(color_scheme="light" if scheme == "dark" else "dark")
    expect(page.locator("body")).not_to_have_css("background-color", background)


def test_the_toggle_stays_chosen(open_page: OpenPage) -> None:
    page = open_page("index.html", "server", color_scheme="light")
    for title in ("Switch to light", "Switch to dark"):
        page.locator(f"label[title*='{title}']:visible").click()
    expect(page.locator("body")).to_have_css("background-color", DARK_PAGE)
    page.goto(page.url.replace("index.html", "benchmarks.html"))
    assert page.evaluate(BACKGROUND) == DARK_PAGE
    assert pixel(page.locator("img[src*=benchmarks-training]")) == (30, 33, 41)


def pixel(element: Locator) -> tuple[int, ...]:
    """Return the colour in the middle of the left edge of an element, 8 pixels from it."""
    element.scroll_into_view_if_needed()
    box = element.bounding_box()
    assert box is not None
    left, middle = int(box["x"]) + 8, int(box["y"] + box["height"] / 2)
    png = element.page.screenshot(clip={"x": left, "y": middle, "width": 1, "height": 1})
    data, at = b"", 8  # behind the signature: chunks of a length, a type, the data and a checksum
    while at < len(png):
        length = int.from_bytes(png[at : at + 4])
        data += png[at + 8 : at + 8 + length] if png[at + 4 : at + 8] == b"IDAT" else b""
        at += length + 12
    return tuple(zlib.decompress(data)[1:4])  # a row begins with the number of its filter


@pytest.mark.parametrize(("scheme", "paper"), [("light", (255, 255, 255)), ("dark", (30, 33, 41))])
def test_charts_have_the_colours_of_the_page(open_page: OpenPage, scheme: str, paper: tuple[int, int, int]) -> None:
    page = open_page("benchmarks.html", color_scheme=scheme, viewport=PHONE)
    charts = page.locator("article img")
    assert charts.count() == 5
    for chart in charts.all():
        assert chart.evaluate("image => image.naturalWidth") == 520
        assert len(chart.get_attribute("alt") or "") > 100
        assert pixel(chart) == paper
