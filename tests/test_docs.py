"""What documentation and Makefile name must exist."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.commands import all_commands

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("studies/*.md")])
LINK = re.compile(r"\]\(([^)#\s]+)")
PROJECT_FILE = re.compile(
    r"\b((?:pipeline|tools|tests|slurm|configs|ds_configs|benchmarks|docs|studies)/[\w./-]+\.(?:py|sh|yaml|json|md|env))\b"
)
SYMBOL = re.compile(r"`(?:pipeline/)?([\w/]+\.py):(\w+)")
TARGET = re.compile(r"(?m)(?:`|^ {4})make ([a-z][a-z0-9-]+)\b")  # in code, not the English verb
PROGRAM_CALL = re.compile(
    r"(?:python -m (benchmarks\.\w+|studies\.\w+\.\w+|studies (?:run|report))|"
    rf"(?:scale-cpt|python -m pipeline) ((?:{'|'.join(all_commands())})(?: init| show)?)(?![\w-]))"
    r"((?:\\\n|[^\n`])*)"
)


def named_files(text: str) -> set[str]:
    return {name for name in PROJECT_FILE.findall(text) if not name.startswith("benchmarks/out/")}


def output_of(
    script: str,
    *arguments: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """What a script, or `scale-cpt COMMAND`, prints."""
    monkeypatch.setattr(sys, "argv", [*script.split(), *arguments])
    with pytest.raises(SystemExit) as exit:
        if script.startswith("scale-cpt "):
            cli.main()
        else:
            package = script.split()[0]
            for module in (package, f"{package}.__main__"):
                monkeypatch.delitem(sys.modules, module, raising=False)
            runpy.run_module(package, run_name="__main__")
    assert not exit.value.code, script
    return capsys.readouterr().out


def check_commands(
    text: str, where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every flag that a command of the text gives to a tool or benchmark is one that it has."""
    shown: dict[str, set[str]] = {}
    for script, command, rest in PROGRAM_CALL.findall(text):
        flags = re.findall(r"(?<!\S)--[a-z][a-z-]*", rest)
        shown.setdefault(script or f"scale-cpt {command}", set()).update(flags)
    assert shown, f"{where} shows no command"
    for script, flags in sorted(shown.items()):
        known = output_of(script, "--help", monkeypatch=monkeypatch, capsys=capsys)
        assert not [flag for flag in flags if flag not in known], (
            f"{where}: {script} does not have all of {flags}"
        )


def test_pages_name_files_links_and_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, flags=re.MULTILINE))
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        missing = []
        for link in LINK.findall(text):
            is_elsewhere = "://" in link or link.startswith("mailto:")
            if not is_elsewhere and not (page.parent / link).exists():
                missing.append(link)
        for name in named_files(text):
            if not (ROOT / name).exists():
                missing.append(name)
        for file, name in SYMBOL.findall(text):
            source = (ROOT / "pipeline" / file).read_text(encoding="utf-8")
            if not re.search(rf"(?m)^\s*(?:def|class) {name}\b", source):
                missing.append(f"{file}:{name}")
        for name in set(TARGET.findall(text)) - targets:
            missing.append(f"make {name}")
        assert not missing, f"{page.relative_to(ROOT)} names what does not exist: {missing}"


def test_commands_of_the_documentation_have_the_flags_that_it_shows(monkeypatch, capsys):
    check_commands(
        "\n".join(page.read_text(encoding="utf-8") for page in PAGES),
        "documentation",
        monkeypatch,
        capsys,
    )


def test_make_targets_call_what_exists(monkeypatch, capsys):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z0-9-]+):.*##", makefile, flags=re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", makefile, flags=re.MULTILINE)
    assert phony is not None and sorted(phony[1].split()) == sorted(targets), (
        ".PHONY and the targets with a help text"
    )
    commands = ""
    for options in (
        ["QUICK=1"],
        ["DATA=texts", "ABLATIONS=1", "COMPARE=1", "MEGATRON=folder", "ONLY=hung"],
    ):
        command = ["make", "--dry-run", *targets, *options]
        commands += subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    assert not [name for name in named_files(commands) if not (ROOT / name).exists()]
    check_commands(commands, "Makefile", monkeypatch, capsys)


def test_nothing_outside_of_tests_imports_them():
    importing = re.compile(r"(?m)^\s*(?:from|import) tests\b")
    for folder in ("pipeline", "studies", "benchmarks", "tools", "serving", "examples"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            assert not importing.search(file.read_text(encoding="utf-8")), file.relative_to(ROOT)


def test_the_site_has_every_page_and_no_broken_link(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    assert "make demo" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")


def test_the_configuration_page_is_what_the_classes_say(monkeypatch, capsys):
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    described = output_of("scale-cpt describe-config", monkeypatch=monkeypatch, capsys=capsys)
    _, top, tables = page.partition("\n## Top level\n")
    assert top + tables == described, (
        "put what scale-cpt describe-config prints below the introduction"
    )
