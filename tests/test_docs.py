"""What the documentation names must exist: links, files of the project, make targets, flags of the tools."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools.describe_config import as_markdown

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("data/**/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)")
PROJECT_FILE = re.compile(
    r"\b((?:pipeline|tools|tests|slurm|configs|ds_configs|benchmarks|docs)/[\w./-]+\.(?:py|sh|yaml|json|md|env))\b"
)
TARGET = re.compile(r"\bmake ([a-z][a-z-]+)\b")
TOOL_CALL = re.compile(r"python (tools|benchmarks)/(\w+)\.py((?:[^\n`]|\\\n)*)")
NOT_TARGETS = {"it", "them", "one", "sure"}  # English after the verb


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_links_and_files_exist(page):
    text = page.read_text(encoding="utf-8")
    links = [link for link in LINK.findall(text) if "://" not in link and not link.startswith("mailto:")]
    missing = [link for link in links if not (page.parent / link).exists()]
    named = {name for name in PROJECT_FILE.findall(text) if not name.startswith("benchmarks/out/")}
    missing += [name for name in sorted(named) if not (ROOT / name).exists()]
    assert not missing, f"{page_id(page)} names what does not exist: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_make_targets_exist(page):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = set(TARGET.findall(page.read_text(encoding="utf-8"))) - NOT_TARGETS
    assert named <= targets


def test_the_configuration_page_is_what_the_classes_say():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == as_markdown(), "make it again: python tools/describe_config.py > docs/configuration.md"


def test_flags_that_the_documentation_shows_exist():
    shown: dict[str, set[str]] = {}
    for page in PAGES:
        for folder, tool, rest in TOOL_CALL.findall(page.read_text(encoding="utf-8")):
            shown.setdefault(f"{folder}/{tool}.py", set()).update(re.findall(r"(?<!\S)--[a-z][a-z-]*", rest))
    assert shown, "the documentation shows no command"
    for script, flags in sorted(shown.items()):
        answer = subprocess.run(
            [sys.executable, script, "--help"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        unknown = {flag for flag in flags if flag not in answer.stdout}
        assert not unknown, f"{script} has no {unknown}"
