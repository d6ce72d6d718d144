"""Which figures of a line of metrics.jsonl are held-out scores of a corpus."""

from __future__ import annotations

import json
from pathlib import Path

from pipeline.run_folder.metrics import read_history


def test_figures_that_follow_from_others_are_no_scores(tmp_path: Path):
    first = {"step": 0, "perplexity/ko": 9.0, "bits_per_byte/ko": 1.5}
    last = first | {"step": 4, "forgetting/ko": 0.1, "kl_from_base/ko": 0.2}
    training = {"step": 2, "loss": 3.0, "prompts": {"ko": "text"}}
    (tmp_path / "x.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in (first, training, last))
    )
    found = read_history(tmp_path / "x.jsonl")
    assert [(one.step, one.figures) for one in found.validations] == [
        (step, {"ko": {"perplexity": 9.0, "bits_per_byte": 1.5}}) for step in (0, 4)
    ]
    assert (found.forgetting, found.learning_rate) == ({"ko"}, None)
