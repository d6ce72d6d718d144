"""What a finished run becomes without more training: with its gate, or averaged with its base; its inference cost."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from pipeline.config.run import RunConfig
from pipeline.conversion.convert import newest_checkpoint
from pipeline.conversion.trained_model import TrainedModel, open_trained
from pipeline.data.samples import load_heldout
from pipeline.data.tokenizer import load_tokenizer
from pipeline.gating.effect import chosen_perplexities, heldout_perplexities
from pipeline.methods import training_method
from pipeline.methods.vocabulary import extended_spec
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import read_spec
from pipeline.model.new_rows import is_new_row
from pipeline.parallel.topology import SINGLE
from pipeline.scale.gate_folder import GATE_FOLDER, open_gate, open_record
from pipeline.sizing.flops import count_flops

BY_DOCUMENT = ", by document"
"""What is added to the label of two models beside each other."""


@dataclass(frozen=True)
class AveragedModel(TrainedModel):
    """A fully fine-tuned model whose weights are averaged with its base's: `share` of the trained ones.

    The base has no rows of an extended vocabulary: they stay what they became.
    """

    share: float = 0.5

    def read_stored(self, name: str) -> Tensor:
        if is_new_row(name):
            return super().read_stored(name)
        base = self.base.read(self.method.base_name(name, self.base.spec)).float()
        return torch.lerp(base, self.reader.read(name), self.share) if name in self.trained else base


def derived_perplexities(
    config: RunConfig, averages: Sequence[float], gated: RunConfig | None
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """For tables, what is added to a run's label, and the held-out perplexities by corpus.

    `gated`: a run whose gate chooses, for each document, the base or the model of `config`.

    Raises:
        CheckpointError, BaseModelError, DataError: what is read is missing or damaged.
    """
    if config.gate is not None:
        heldout = open_record(config.folder / GATE_FOLDER).heldout
        yield " + gate", {name: text.gated_perplexity or math.inf for name, text in heldout.items()}
    if not averages and gated is None:
        return
    trained = open_trained(newest_checkpoint(config), config.base)
    samples = load_heldout(config.data, tokenizer_fingerprint=load_tokenizer(config.tokenizer).fingerprint)
    own = {field.name: getattr(trained, field.name) for field in fields(trained)}
    for share in averages:
        yield f", averaged: {share:g}", heldout_perplexities(AveragedModel(**own, share=share), samples, config)
    if gated is not None:
        yield BY_DOCUMENT, chosen_perplexities(trained, open_gate(gated.folder / GATE_FOLDER)[0], samples, config)


def inference_cost(config: RunConfig) -> float:
    """The FLOPs of a token's forward pass over the base's; a gate's one product of vectors does not count."""
    spec, length = read_spec(config.base), config.data.sequence_length
    with torch.device("meta"), torch.no_grad():
        models = training_method(config).build(extended_spec(config, spec), SINGLE, "none"), Decoder(spec)
        own, base = (count_flops(model, length).total for model in models)
    return own / base
