"""The page of what engines serve is what the tests' marks say."""

from __future__ import annotations

from tests.package.matrix import ENGINES, PAGE, marks, page


def test_the_page_is_what_the_marks_say() -> None:
    assert PAGE.read_text() == page(), "python -m tests.package.matrix"


def test_every_engine_has_a_plain_case_that_works() -> None:
    works = {mark.engine for mark in marks() if mark.where != "refused" and mark.kind[0] == "full attention"}
    assert works == set(ENGINES.values())
