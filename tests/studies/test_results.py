"""summary.json and learning_rates.json: they are read as they were written, and other files are refused."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from pipeline.errors import RunFolderError
from pipeline.studies.results import Row, Tried, methods_table, read_rows, read_tried, write_summary
from tests.studies.report.studies import rows

SHIPPED = sorted((Path(__file__).parents[2] / "docs" / "results").glob("*/summary.json"))


def test_rows_are_read_as_written_and_null_is_infinite(tmp_path):
    own = [Row.model_validate(row) for row in rows()]
    own[0].after["korean"]["perplexity"] = math.inf
    tried = [
        Tried(
            label="LoRA", learning_rate=1e-3, seed=1, new_perplexity=4.5, after=own[0].after, chosen=True,
            at_the_edge=False,
        )
    ]  # fmt: skip
    write_summary(tmp_path, own, tried)
    assert read_rows(tmp_path) == own and read_tried(tmp_path) == tried
    assert json.loads((tmp_path / "summary.json").read_text())[0]["after"]["korean"]["perplexity"] is None


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_rows_of_earlier_versions_do_not_change(path, tmp_path):
    write_summary(tmp_path, read_rows(path.parent), [])
    after, before = (json.loads(file.read_text()) for file in (tmp_path / "summary.json", path))
    assert [{key: value for key, value in row.items() if value is not None} for row in after] == [
        {key: value for key, value in row.items() if value is not None} for row in before
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[]", "expected at least one row, found none"),
        ("[{", "not JSON"),
        ("{}", "the file: Input should be a valid list"),
        ('[{"label": "LoRA"}]', r"0\.steps: Field required"),
    ],
)
def test_another_file_is_refused(content, said, tmp_path):
    with pytest.raises(RunFolderError, match=r"summary.json: no such file; scale-cpt study writes it"):
        read_rows(tmp_path)
    (tmp_path / "summary.json").write_text(content)
    with pytest.raises(RunFolderError, match=said) as raised:
        read_rows(tmp_path)
    assert str(tmp_path / "summary.json") in str(raised.value) and "\n" not in str(raised.value)


def test_corpora_of_questions_share_a_column_for_each_role():
    """A run that reads a text, learns the tasks c and d, and is asked about the old ones a and b."""
    text = {"perplexity": 3.5, "bits_per_byte": 0.75}
    roles = {"text": "new", "c": "new", "d": "new", "a": "replay", "b": "replay"}

    def row(seed: int, known: float) -> Row:
        def figures(**shares: float) -> dict[str, dict[str, float]]:
            return {"text": text, **{name: {**text, "first_token_accuracy": share} for name, share in shares.items()}}

        before, after = figures(c=0.25, d=0.25, a=1.0, b=1.0), figures(c=0.5, d=1.0, a=known, b=0.0)
        return Row(label="LoRA", seed=seed, seconds=7.0, steps=1, roles=roles, before=before, after=after)

    header, _, line, _, note = methods_table([row(1, 0.2), row(2, 0.4)]).splitlines()
    assert "text: perplexity" in header and "a: perplexity" not in header
    assert header.rstrip().endswith("new: first token  before  replay: first token  before")
    assert line.split()[-6:] == ["75.0%", "±0.0%", "25.0%", "15.0%", "±7.1%", "100.0%"]
    assert note == "± is one standard deviation over seeds, as of a sample."
