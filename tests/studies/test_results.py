"""summary.json is read back as it was, other files are refused; the tables; models averaged with their base."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from pipeline.errors import RunFolderError
from pipeline.files import write_json
from pipeline.studies.results import Row, methods_table, rates_table, read_rows
from tests.studies.report.studies import METHODS, at_rates, rows

SHIPPED = Path(__file__).parents[2] / "docs" / "results" / "paper-korean"


def test_rows_are_read_as_written_and_null_is_infinite(tmp_path):
    own = [*map(Row.model_validate, rows()), *read_rows(SHIPPED)]
    own[0].after["korean"]["perplexity"] = math.inf
    write_json(tmp_path / "summary.json", [row.model_dump() for row in own])
    assert read_rows(tmp_path) == own


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "no such file; expected a study.s folder"),
        ("[]", "expected at least one row, found none"),
        ("[{", "the file: Invalid JSON"),
        ("{}", "the file: Input should be a valid array"),
        ('[{"label": "LoRA"}]', r"0\.steps: Field required"),
    ],
)
def test_another_file_is_refused(content, said, tmp_path):
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(RunFolderError, match=said) as raised:
        read_rows(tmp_path)
    assert str(tmp_path / "summary.json") in str(raised.value) and "\n" not in str(raised.value)


def test_the_table_of_rates_has_the_first_seed_and_those_that_diverged():
    """The first method has one rate, the second three: the best is at the edge, and one diverged."""
    single, several = ([row for row in rows((1, 2)) if row["method"] == method] for method in ("fft", "lora"))
    tried = [*single, *at_rates(several, (1.0, 0.5, 0.1))]
    tried[3] |= {"before": {}, "after": {}}
    lines = rates_table([Row.model_validate(row) for row in tried]).splitlines()[2:]
    assert [line.split()[:2] for line in lines] == [["LoRA", rate] for rate in ("0.001", "0.0005", "0.0001")]
    assert lines[0].endswith("chosen, at the edge") and lines[1].endswith("diverged") and lines[2][-1].isdigit()
    assert rates_table([Row.model_validate(row) for row in single]) == ""
    methods = methods_table([Row.model_validate(row) for row in tried]).splitlines()
    assert [line.split("  ")[0] for line in methods[2:4]] == [METHODS[0][0], "LoRA"] and methods[4] == ""


def test_the_table_of_methods_has_the_texts():
    """Means and deviations over seeds; the corpora of questions, which are many, are left to the report."""
    text = {"perplexity": 3.5, "bits_per_byte": 0.75}
    asked = {"korean": text, "facts": {**text, "first_token_accuracy": 0.5}}
    own = Row(label="LoRA", seed=1, steps=1, roles={"korean": "new", "facts": "new"}, before=asked, after=asked)
    worse = own.model_copy(update={"seed": 2, "after": {**asked, "korean": {"perplexity": 4.5, "bits_per_byte": 1.25}}})
    header, _, line, _, note = methods_table([own, worse]).splitlines()
    assert header.rstrip().endswith("GiB  korean: perplexity  before  bits per byte")
    assert line.split() == ["LoRA", "4.00", "±0.71", "3.50", "1.000"]
    assert note == "± is one standard deviation over seeds, as of a sample."
