"""The documents as a site: built without warnings, every link resolves, and no page is wider than a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote

import pytest

pytestmark = pytest.mark.covers("docs", "mkdocs.yml")

ROOT = Path(__file__).resolve().parents[1]
CHROMIUM = shutil.which("chromium")
WIDTH = 400


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not find_spec("mkdocs"):
        pytest.skip("mkdocs is not installed (make lint installs it)")
    folder = tmp_path_factory.mktemp("site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


class Links(HTMLParser):
    """What a page links to, and the names in it that others can link to."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            if name in ("id", "name") and value:
                self.anchors.add(value)


def test_site_has_every_page_of_the_documents(site: Path) -> None:
    pages = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 40
    assert [page for page in pages if not page.name.startswith("_") and not (site / page).is_file()] == []


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    foreign = re.compile(r"<(?:script|link)[^>]+(?:src|href)=\"https?://")
    assert [path.name for path in site.rglob("*.html") if foreign.search(path.read_text(encoding="utf-8"))] == []


def test_links_resolve(site: Path) -> None:
    pages = {
        path: Links(path) for path in site.rglob("*.html") if path.name != "404.html"
    }  # its links are for a web server's root
    broken = []
    for page, parsed in pages.items():
        for link in parsed.links:
            if re.match(r"[a-z]+:|//", link):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            anchors = pages[target].anchors if target in pages else {anchor}
            if not target.exists() or (anchor and anchor not in anchors):
                broken.append(f"{page.relative_to(site)}: {link}")
    assert broken == []


# What reaches beyond the window, unless it scrolls in a box of its own.
BEYOND = """width => [...document.querySelectorAll(".wy-nav-content *")].filter(element => {
  const box = element.getBoundingClientRect();
  if (!box.width || box.right <= width + 1) return false;
  for (let above = element.parentElement; above && !above.matches(".wy-nav-content-wrap"); above = above.parentElement)
    if (["auto", "scroll"].includes(getComputedStyle(above).overflowX)) return false;
  return true;
}).map(element => `${element.tagName} ${element.textContent.trim().slice(0, 40)}`)"""


@pytest.fixture(scope="module")
def widths(site: Path) -> Iterator[dict[str, tuple[int, int, list[str]]]]:
    """Of each page at WIDTH: how wide it is, its headings of the first rank, and what reaches beyond the window."""
    if CHROMIUM is None or not find_spec("playwright"):
        pytest.skip("chromium is not installed (tests/services.sh install browser)")
    from playwright.sync_api import sync_playwright

    seen = {}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": 800})
        for path in sorted(site.rglob("*.html")):
            if path.name not in ("404.html", "search.html"):
                page.goto(f"file://{path}")
                wide = page.evaluate("document.documentElement.scrollWidth")
                headings = page.locator("h1").count()
                seen[str(path.relative_to(site))] = wide, headings, page.evaluate(BEYOND, WIDTH)
        browser.close()
    yield seen


def test_no_page_is_wider_than_a_phone(widths: dict[str, tuple[int, int, list[str]]]) -> None:
    assert len(widths) > 40
    assert {name: measured for name, measured in widths.items() if measured != (WIDTH, 1, [])} == {}
