"""The documents as a site: built without warnings, every link resolves, and nothing is loaded from other hosts."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from support.docs_site import ROOT, build_site

pytestmark = pytest.mark.covers("docs", "mkdocs.yml")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_site(tmp_path_factory.mktemp("site"))


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
