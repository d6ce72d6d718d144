"""What gates do where the text changes within a document.

    python -m benchmarks.code_switching run.yaml

Held-out windows of a finished run with a section `gate` are cut from old text into new, and from new into old. For each
kind of features, with and without splices: how many tokens after the change are open, the first eight and the later
ones.
"""

from __future__ import annotations

from itertools import islice, product
from typing import NamedTuple, get_args

import torch
from torch import Tensor

from benchmarks.results import Row, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.config.run import GateFeatures, GateSettings, RunConfig, load_config
from pipeline.conversion.convert import newest_checkpoint
from pipeline.conversion.trained_model import open_trained
from pipeline.data.samples import load_heldout
from pipeline.data.tokenizer import load_tokenizer
from pipeline.errors import ConfigError
from pipeline.gating.fit_run import BaseStream, fit_on, gate_layer
from pipeline.gating.windows import Windows, as_windows, joined, read_fitting_text, spliced

FIRST = 8
DIRECTIONS = {True: "new_after_old", False: "old_after_new"}


class Change(NamedTuple):
    """Held-out windows in which the text changes. `second`: the tokens after the change that belong to the document in
    which it is; `first_few`: the first of them. Both are bool [N, S].
    """

    windows: Windows
    second: Tensor
    first_few: Tensor


def main() -> None:
    parser = make_parser(__doc__)
    command_line.add_run(parser)
    options = parser.parse_args()
    config = load_config(options.run, options.set)
    if config.gate is None:
        raise ConfigError(f"{config.name}: has no section gate")
    rows = code_switching(config, config.gate)
    print_rows(rows)
    write_rows(options, rows)


@torch.no_grad()
def code_switching(config: RunConfig, settings: GateSettings) -> list[Row]:
    """The shares of open tokens, for each way of fitting."""
    model = open_trained(newest_checkpoint(config), config.base)
    fingerprint = load_tokenizer(config.base).fingerprint
    changes = heldout_changes(config, fingerprint)
    stream = BaseStream(model.loaded(torch.float32, torch.device("cpu")), gate_layer(settings, model))
    rows = []
    for splices, features in product((False, True), get_args(GateFeatures)):
        varied = settings.model_copy(update={"splices": splices, "features": features})
        fit = fit_on(stream, read_fitting_text(config, varied, fingerprint), varied)
        row = {"features": features, "splices": str(splices)}
        row["new_text_open"] = float((fit.new > fit.gate.threshold).double().mean())
        for is_new, change in changes.items():
            is_open = stream.scores(change.windows, fit.gate) > fit.gate.threshold
            for part, tokens in ((f"first_{FIRST}", change.first_few), ("later", change.second & ~change.first_few)):
                row[f"{DIRECTIONS[is_new]}_{part}_open"] = float(is_open[tokens].double().mean())
        rows.append(row)
    return rows


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
