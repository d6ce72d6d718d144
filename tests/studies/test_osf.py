"""The frontier's published rival: PEFT's OSF, trained and scored as a study's runs are."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from pipeline.data.dataset.packing import IGNORED
from pipeline.data.dataset.samples import load_heldout
from pipeline.extensions.gate.inputs import decoder_inputs
from pipeline.extensions.gate.windows import as_windows
from pipeline.model.from_hf import open_base
from pipeline.run_folder.metrics import readable
from studies.frontier import osf
from tests.studies.studies import study_values, write_study
from tests.widened import unwidened

pytestmark = pytest.mark.full


def test_the_table_has_the_base_as_validation_scores_it_and_every_rate(
    tokens, tmp_path, monkeypatch, capsys
):
    values = study_values(tmp_path, tokens)
    values["methods"] = {
        "fft": {"label": "Full", "method": {"name": "fft"}, "learning_rates": [1e-3]}
    }
    study = write_study(tmp_path, values)
    monkeypatch.setattr(sys, "argv", ["osf.py", str(study), "--learning-rates", "1e-5", "2e-3"])
    osf.main()
    header, _, base, low, best = (line.split() for line in capsys.readouterr().out.splitlines())
    corpora = header[1:]
    assert base[0] == "base" and low[:2] == ["OSF", "1e-05"] and best[:2] == ["OSF", "0.002"]
    assert base[1:] == [readable(perplexity) for perplexity in by_decoder(study, corpora)]
    korean = corpora.index("korean")
    assert float(best[2 + 2 * korean]) < float(low[2 + korean]) < float(base[1 + korean])
    assert sum(cell.startswith("±") for cell in best) == len(corpora), (
        "the best rate runs with every seed"
    )


def by_decoder(study: Path, corpora: list[str]) -> list[float]:
    """The base's perplexities by this project's own decoder."""
    config = osf.open_study(study, study.parent).compared("fft", 1e-3, 1).config
    decoder = unwidened(open_base(config.base))
    heldout = load_heldout(config.data, tokenizer_fingerprint=None)
    found = []
    for name in corpora:
        count = min(config.validation.max_sequences, len(heldout[name]))
        (group,) = as_windows([heldout[name][at] for at in range(count)], is_new=False).groups()
        inputs, targets = decoder_inputs(group, config, decoder)
        with torch.no_grad():
            nll = decoder.output(decoder.hidden_states(*inputs), targets).nll
        found.append(math.exp(float(nll.sum() / (targets != IGNORED).sum())))
    return found
