"""Models that a study compares without more training.

Full fine-tuning averaged with its base, and two whole models of which a gate chooses one for each
document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice

import torch
from torch import Tensor

from pipeline.checkpoint.folder import newest_checkpoint
from pipeline.checkpoint.trained_model import TrainedModel, open_trained
from pipeline.config.run import RunConfig
from pipeline.data.dataset.packing import IGNORED
from pipeline.data.dataset.samples import HeldoutSamples, load_heldout
from pipeline.data.tokenizer.load import load_tokenizer
from pipeline.extensions.gate.inputs import decoder_inputs, loaded
from pipeline.extensions.gate.windows import Windows, as_windows
from pipeline.gating.folder import GATE_FOLDER, open_gate
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.decoder import Decoder
from pipeline.model.from_hf import load_base
from pipeline.model.new_tokens import holds_new_tokens
from pipeline.model.output import perplexity
from pipeline.parallel.topology import SINGLE

BY_DOCUMENT = ", by document"
NllOf = Callable[[Windows], Tensor]
"""The nll of each target of a group of windows: [N, S]."""


@dataclass(frozen=True)
class AveragedModel(TrainedModel):
    """A fully fine-tuned model averaged with its base: `share` is the weight of the trained one.

    The base has no rows of an extended vocabulary: they stay as they were trained.
    """

    share: float = 0.5

    def read_stored(self, name: str) -> Tensor:
        trained = super().read_stored(name)
        if name not in self.trained or holds_new_tokens(name):
            return trained
        # In fp32, as the trained weights are: in 16 bits the average would be rounded twice.
        base = self.base.read(self.method.base_name(name, self.base.spec)).float()
        return torch.lerp(base, trained, self.share)


@torch.no_grad()
def derived_perplexities(
    config: RunConfig, averages: Sequence[float], gated: RunConfig | None
) -> Iterator[tuple[str, Mapping[str, float]]]:
    """The models made of a run, each as the end of its label and its perplexities by corpus.

    Args:
        averages: the share of the trained weights in each average with the base's.
        gated: a run whose gate chooses, for each document, the base or the model of `config`. The
            model gets the documents on which most tokens are open.

    Raises:
        CheckpointError, BaseModelError, DataError: a file is missing or damaged.
    """
    model = open_trained(newest_checkpoint(config), config.base)
    heldout = load_heldout(
        config.data, tokenizer_fingerprint=load_tokenizer(config.tokenizer).fingerprint
    )

    def nll_of(decoder: CausalDecoder) -> NllOf:
        def nll(group: Windows) -> Tensor:
            inputs, targets = decoder_inputs(group, config, decoder)
            found = decoder.output(decoder.hidden_states(*inputs), targets).nll
            # In fp64: a corpus's sum has as many terms as the corpus has tokens.
            return found.double().cpu().view(group.tokens.shape)

        return nll

    # The fields of the trained model, of which the averages are made.
    parts = {field.name: getattr(model, field.name) for field in fields(model)}
    for share in averages:
        averaged = loaded(AveragedModel(**parts, share=share))
        yield f", averaged: {share:g}", _perplexities(heldout, config, nll_of(averaged))
    if gated is None:
        return
    trained = loaded(model)
    # The base itself: the run trained all of its weights, so that none of the model's paths is it.
    base = Decoder(model.base.spec)
    load_base(base, model.base, SINGLE)
    base = base.to(trained.device, trained.dtype).eval()
    gate, _ = open_gate(gated.folder / GATE_FOLDER)

    def chosen(group: Windows) -> Tensor:
        inputs, _ = decoder_inputs(group, config, base)
        stream = base.base_stream(*inputs, layer=gate.layer)
        is_open = gate.is_open(stream, group.document_ids.to(stream.device)).cpu()
        is_open |= gate.opens_id(group.tokens)
        # Both models read every document, of which one is used: only perplexities are wanted.
        return torch.where(group.mostly(is_open), nll_of(trained)(group), nll_of(base)(group))

    yield BY_DOCUMENT, _perplexities(heldout, config, chosen)


def _perplexities(
    heldout: Mapping[str, HeldoutSamples], config: RunConfig, nll_of: NllOf
) -> dict[str, float]:
    """The perplexity of each corpus, on the samples that validation reads."""
    found: dict[str, float] = {}
    for name, samples in heldout.items():
        windows = as_windows(list(islice(samples, config.validation.max_sequences)), is_new=False)
        predicted = int((windows.targets != IGNORED).sum())
        nll = 0.0
        for group in windows.groups():
            nll += float(nll_of(group).sum())
        # Short documents may predict nothing: a summary has infinity, as for a run that diverged.
        if predicted:
            found[name] = perplexity(nll / predicted)
        else:
            found[name] = math.inf
    return found
