"""The texts that come with every gate are made again from their sources."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from unittest.mock import patch

import babel
import pytest

from pipeline.errors import DataError
from pipeline.extensions.gate.kinds import SHIPPED, read_kinds
from studies.gate_negatives.__main__ import NOTICES, TEXTS, main
from studies.gate_negatives.records import Record
from studies.gate_negatives.scripts import languages_by_script

PO = """
msgid ""
msgstr "Content-Type: text/plain; charset=UTF-8\\n"

msgid "Enter a whole number."
msgstr "Saisissez un nombre entier."

msgid "Page %(number)s of many"
msgstr "Page %(number)s parmi beaucoup"

#, fuzzy
msgid "A guess by a program"
msgstr "Une supposition d'un programme"

msgid "Not translated at all"
msgstr "Not translated at all"
"""


@pytest.fixture
def wheels(tmp_path) -> Path:
    """Two small wheels, built as those of PyPI."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "django-5.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("django/conf/locale/fr/LC_MESSAGES/django.po", PO)
        wheel.writestr("django-5.2.dist-info/licenses/LICENSE", "of Django")
    with zipfile.ZipFile(folder / "spacy-3.8-cp311-any.whl", "w") as wheel:
        wheel.writestr("spacy/lang/fr/examples.py", 'sentences = ["Où est  la gare ?"]')
        wheel.writestr("spacy-3.8.dist-info/licenses/LICENSE", "of spaCy")
    return folder


def make(wheels: Path, output: Path) -> None:
    output.mkdir(exist_ok=True)
    arguments = ["gate_negatives", "--wheels", str(wheels), "--output", str(output)]
    with patch("sys.argv", arguments):
        main()


def test_messages_and_sentences_are_read_from_wheels(wheels, tmp_path):
    make(wheels, tmp_path / "a")
    make(wheels, tmp_path / "b")
    assert (tmp_path / "a" / TEXTS).read_bytes() == (tmp_path / "b" / TEXTS).read_bytes()
    french = [text for kind, text in read_kinds(tmp_path / "a" / TEXTS) if kind == "fr"]
    assert "Saisissez un nombre entier." in french and "Où est la gare ?" in french
    for text in french:
        assert not re.search("%|supposition|Not translated", text)
    notices = (tmp_path / "a" / NOTICES).read_text(encoding="utf-8")
    assert "django-5.2\n\nof Django" in notices and "spacy-3.8\n\nof spaCy" in notices

    shipped_notices = SHIPPED.with_name(NOTICES).read_text(encoding="utf-8")
    if f"Babel {babel.__version__} " in shipped_notices:
        # What does not come from the two wheels is the shipped file's, to the letter.
        shipped = set(read_kinds(SHIPPED))
        for record in read_kinds(tmp_path / "a" / TEXTS):
            of_wheels = record.kind == "fr" and record.text in (french[-2:])
            is_script = record.kind.startswith("script:")
            assert of_wheels or is_script or record in shipped


def test_a_missing_wheel_is_one_line(wheels, tmp_path):
    (wheels / "spacy-3.8-cp311-any.whl").unlink()
    with pytest.raises(DataError, match=r"expected one wheel spacy-\*\.whl, found 0"):
        make(wheels, tmp_path)


def test_scripts_count_the_languages_that_write_them():
    records = [Record("ko", "한국어 words"), Record("ja", "日本語のかな"), Record("zh", "中文")]
    writers = languages_by_script(records)
    assert writers["Hangul"] == 1 and writers["Cjk"] == 2 and writers["Hiragana"] == 1
