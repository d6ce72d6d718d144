"""The tables that a finished study prints."""

from __future__ import annotations

from pipeline.studies.results import Row
from pipeline.studies.summary import Summary

TEXT = {"perplexity": 3.5, "bits_per_byte": 0.75}


def answers(share: float) -> dict[str, float]:
    return {**TEXT, "first_token_accuracy": share}


def row(seed: int, known: float) -> Row:
    """A run that reads a text, learns two tasks, and is asked about two old ones."""
    roles = {"text": "new", "c": "new", "d": "new", "a": "replay", "b": "replay"}
    before = {"text": TEXT, **{name: answers(0.25 if name in "cd" else 1.0) for name in "cdab"}}
    after = {"text": TEXT, "c": answers(0.5), "d": answers(1.0), "a": answers(known), "b": answers(0.0)}
    return Row(
        label="LoRA",
        seed=seed,
        learning_rate=1e-3,
        trainable_parameters=1234,
        seconds=7.0,
        steps=1,
        roles=roles,
        before=before,
        after=after,
    )


def test_corpora_of_questions_share_a_column_per_role():
    text = Summary([row(1, 0.2), row(2, 0.4)], []).as_text()
    header, _, line = text.splitlines()[-5:-2]
    assert "text: perplexity" in header
    assert "a: perplexity" not in header
    assert header.rstrip().endswith("new: first token  before  replay: first token  before")
    assert line.split()[-6:] == ["75.0%", "±0.0%", "25.0%", "15.0%", "±7.1%", "100.0%"]
    assert text.endswith("± is one standard deviation over seeds, as of a sample.")
