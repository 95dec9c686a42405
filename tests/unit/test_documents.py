"""Documents tell how it is today."""

from __future__ import annotations

import re
from pathlib import Path

from rollpacker.api_reference import api_reference
from rollpacker.settings_reference import settings_reference

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("services/*/README.md")]


def test_the_reference_of_the_run_settings_is_written_from_the_code() -> None:
    assert (ROOT / "docs/run_settings.md").read_text() == settings_reference()


def test_the_reference_of_the_api_is_written_from_the_protos() -> None:
    assert (ROOT / "docs/api.md").read_text() == api_reference()


def test_every_link_between_documents_leads_somewhere() -> None:
    dead = [
        f"{document.relative_to(ROOT)}: {target}"
        for document in DOCUMENTS
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text())
        if not (document.parent / target).exists()
    ]
    assert dead == []


def test_every_make_target_that_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {
        (document.name, target)
        for document in DOCUMENTS
        for target in re.findall(r"`make ([a-z-]+)", document.read_text())
    }
    assert {(name, target) for name, target in named if target not in targets} == set()
