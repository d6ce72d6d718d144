r"""Makes the texts on which every gate learns to stay closed, and the notices of their licences.

    pip download --no-deps django==5.2.19 spacy==3.8.18 --dest wheels
    python -m studies.gate_negatives --wheels wheels --output pipeline/extensions/gate

The same versions of Babel, Django, spaCy and Python's Unicode give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from zipfile import ZipFile

import babel
import zstandard

from pipeline import command_line
from pipeline.errors import DataError
from pipeline.files.publishing import published_file, write_text
from studies.gate_negatives.cldr import cldr_records
from studies.gate_negatives.packages import django_records, spacy_records
from studies.gate_negatives.records import Record
from studies.gate_negatives.samples import sample_records
from studies.gate_negatives.scripts import script_records

TEXTS = "negatives.jsonl.zst"
NOTICES = "negatives.licenses.txt"
_NOTICE = """\
The texts in {texts} are made by `python -m studies.gate_negatives`, of these sources:

- names and patterns of the CLDR, as Babel {babel} carries them, and names of the letters of Unicode
  {unicode}: Unicode License;
- messages and code of Django ({django}): BSD-3-Clause;
- example sentences of spaCy ({spacy}): MIT;
- samples of code in studies/gate_negatives, formulas, tables and the like: Apache-2.0, as scale-cpt.

The licenses of the first three follow.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="makes the negatives that come with scale-cpt")
    parser.add_argument("--wheels", type=Path, required=True, help="folder of the two wheels")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to")
    arguments = parser.parse_args()
    django = _wheel(arguments.wheels, "django")
    spacy = _wheel(arguments.wheels, "spacy")
    languages = [*cldr_records(), *django_records(django), *spacy_records(spacy)]
    records = [*languages, *script_records(languages), *sample_records()]
    with published_file(arguments.output / TEXTS) as file:
        file.write(as_jsonl(records))
    notice = _NOTICE.format(
        texts=TEXTS,
        babel=babel.__version__,
        unicode=unicodedata.unidata_version,
        django=_release(django),
        spacy=_release(spacy),
    )
    unicode = Path(babel.__file__).parent / "locale-data" / "LICENSE.unicode"
    licenses = [notice, f"Unicode\n\n{unicode.read_text(encoding='utf-8')}"]
    licenses += [_license(django), _license(spacy)]
    write_text(arguments.output / NOTICES, "\n\n".join(licenses))


def as_jsonl(records: Iterable[Record]) -> bytes:
    """The records, those of a kind together, as compressed lines of JSON."""
    lines: list[str] = []
    # Each text once; within a kind in the order of its sources.
    for record in sorted(dict.fromkeys(records), key=lambda record: record.kind):
        lines.append(json.dumps(record._asdict(), ensure_ascii=False) + "\n")
    return zstandard.ZstdCompressor(level=19).compress("".join(lines).encode())


def _wheel(folder: Path, package: str) -> Path:
    """The wheel of a package in `folder`.

    Raises:
        DataError: there is none, or there are several.
    """
    found = sorted(folder.glob(f"{package}-*.whl"))
    if len(found) != 1:
        raise DataError(f"{folder}: expected one wheel {package}-*.whl, found {len(found)}")
    return found[0]


def _release(wheel: Path) -> str:
    """The name and version of a wheel: `django-5.2.19`."""
    return "-".join(wheel.name.split("-")[:2])


def _license(wheel: Path) -> str:
    with ZipFile(wheel) as files:
        for path in files.namelist():
            if path.endswith(".dist-info/licenses/LICENSE"):
                return f"{_release(wheel)}\n\n{files.read(path).decode()}"
    raise DataError(f"{wheel}: expected a LICENSE, found none")


if __name__ == "__main__":
    command_line.run(main)
