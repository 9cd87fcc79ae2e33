"""Words of the field: the counts of private ones in tests/unit/words.json may only shrink (``make words`` prints
them).
"""

from __future__ import annotations

import json

import pytest

from support.words import (
    AREAS,
    IN_TEXTS,
    LIMITS,
    PRIVATE,
    REASONS,
    counts,
    terms_in,
    unused_exceptions,
    uses_in_python,
    uses_in_text,
)


def test_identifiers_are_split_into_words() -> None:
    assert terms_in("own_placesOf _HTTPRoom x2") == {"own", "places", "of", "http", "room", "x"}


def test_every_kind_of_use_is_counted() -> None:
    source = 'def place(found): """What was learnt."""\n{"bill": found.said, "a bill": f"{place} was told"}'
    uses = sorted((use.line, use.kind, use.term) for use in uses_in_python("x.py", source))
    assert uses == [
        (1, "name", "found"),
        (1, "name", "place"),
        (1, "text", "learnt"),
        (2, "key", "bill"),
        (2, "name", "found"),
        (2, "name", "place"),
        (2, "name", "said"),
        (2, "text", "bill"),
        (2, "text", "told"),
    ]
    assert [use.term for use in uses_in_text("x.html", "<p>a place</p>\n<p>the catalogue</p>")] == ["catalogue"]


@pytest.mark.parametrize("area", AREAS)
def test_private_words_become_fewer(area: str) -> None:
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))[area]
    more = {
        term: f"{count}, was {limits.get(term, 0)}"
        for term, count in counts()[area].items()
        if count > limits.get(term, 0)
    }
    assert more == {}, "use the field's term (tests/support/words.py AREA|TERM|PATH shows where)"


def test_every_exception_is_still_needed() -> None:
    assert unused_exceptions() == []


def test_every_term_that_is_left_has_its_reason_and_no_other_has() -> None:
    left = {term for terms in counts().values() for term in terms}
    assert sorted(left - REASONS.keys()) == [], "say in REASONS in which meaning it stays, or use the field's term"
    assert sorted(REASONS.keys() - left) == []
    assert IN_TEXTS.keys() <= PRIVATE.keys()
