"""What gates do where the text changes within a document.

    python benchmarks/code_switching.py run.yaml

Held-out windows of a finished run with a section `gate` are cut from old text into new, and from new into old. For each
kind of features, with and without splices: how many tokens after the change are open, the first eight and the later
ones.
"""

from __future__ import annotations

import argparse
from itertools import islice, product
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from pipeline import command_line
from pipeline.config.run import GateFeatures, GateSettings, RunConfig, load_config
from pipeline.conversion.convert import newest_checkpoint
from pipeline.conversion.trained_model import open_trained
from pipeline.data.samples import load_heldout
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import ConfigError
from pipeline.evaluation.table import table
from pipeline.gating.fit_run import BaseStream, fit_on, gate_layer
from pipeline.gating.windows import Windows, as_windows, joined, read_fitting_text, spliced

FIRST = 8
DIRECTIONS = {True: "new after old", False: "old after new"}


class Change(NamedTuple):
    """Held-out windows in which the text changes. `second`: the tokens after the change that belong to the document in
    which it is; `first_few`: the first of them. Both are bool [N, S].
    """

    windows: Windows
    second: Tensor
    first_few: Tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    command_line.add_run(parser)
    arguments = parser.parse_args()
    config = load_config(arguments.run, arguments.set)
    if config.gate is None:
        raise ConfigError(f"{config.name}: has no section gate")
    print(code_switching(config, config.gate))


@torch.no_grad()
def code_switching(config: RunConfig, settings: GateSettings) -> str:
    """The table."""
    model = open_trained(newest_checkpoint(config), config.base)
    fingerprint = load_tokenizer(config.base).fingerprint
    changes = heldout_changes(config, fingerprint)
    stream = BaseStream(model.loaded(torch.float32, torch.device("cpu")), gate_layer(settings, model))
    header = ["features", "splices", "new text open"]
    header += [f"{name}: {part} open" for name in DIRECTIONS.values() for part in (f"first {FIRST}", "later")]
    rows = []
    for splices, features in product((False, True), get_args(GateFeatures)):
        varied = settings.model_copy(update={"splices": splices, "features": features})
        fit = fit_on(stream, read_fitting_text(config, varied, fingerprint), varied)
        row = [features, str(splices), f"{(fit.new > fit.gate.threshold).double().mean():.2%}"]
        for change in changes.values():
            is_open = stream.scores(change.windows, fit.gate) > fit.gate.threshold
            parts = change.first_few, change.second & ~change.first_few
            row += [f"{is_open[part].double().mean():.1%}" for part in parts]
        rows.append(row)
    return table(header, rows)


def heldout_changes(config: RunConfig, fingerprint: str) -> dict[bool, Change]:
    """Windows that change into new text, and into old text, by whether the second text is new."""
    kinds: dict[bool, list[Windows]] = {True: [], False: []}
    for name, samples in load_heldout(config.data, tokenizer_fingerprint=fingerprint).items():
        is_new = config.data.corpora[name].role == "new"
        kinds[is_new].append(as_windows(list(islice(samples, config.validation.max_sequences)), is_new=is_new))
    if not all(kinds.values()):
        raise ConfigError("data.corpora: expected held-out parts of new text and of replayed text")
    made, changes = spliced(joined(kinds[False]), joined(kinds[True]), config.seed), {}
    for second_is_new in (True, False):
        chosen = made.rows(made.is_new[:, 0] != second_is_new)
        after = chosen.is_new == second_is_new
        at = after.int().argmax(dim=1, keepdim=True)
        second = after & (chosen.document_ids == chosen.document_ids.gather(1, at)) & chosen.present
        changes[second_is_new] = Change(chosen, second, second & (after.int().cumsum(dim=1) <= FIRST))
    return changes


if __name__ == "__main__":
    command_line.run(main)
