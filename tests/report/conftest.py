"""A made-up study and its page, written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from explorl.report.study_page import write_report

from .studies import make_results


@pytest.fixture(scope="session")
def results() -> dict[str, Any]:
    """A whole study; not to be changed by a test."""
    return make_results()


@pytest.fixture(scope="session")
def report(results: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of `results`."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, results)
    return path
