"""The rules of tests/support/session.py, here too."""

from __future__ import annotations

from support.session import (  # noqa: F401
    out_of_reach,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_make_collect_report,
    pytest_runtest_makereport,
)
