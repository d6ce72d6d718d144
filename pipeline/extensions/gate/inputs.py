"""What a trained model needs to run on windows of text: where it is, and its inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from pipeline.checkpoint.trained_model import TrainedModel
from pipeline.config.run import RunConfig
from pipeline.extensions.gate.windows import Windows
from pipeline.model.bases import computed_dtype
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.paths import TokenBatch


def loaded(model: TrainedModel) -> CausalDecoder:
    """The model on a GPU in its base's type; without a GPU in fp32 on the CPU.

    Matrix products in 16 bits are slow on CPUs.
    """
    if torch.cuda.is_available():
        return model.loaded(computed_dtype(model.base), torch.device("cuda"))
    return model.loaded(torch.float32, torch.device("cpu"))


def decoder_inputs(
    group: Windows, config: RunConfig, decoder: CausalDecoder
) -> tuple[TokenBatch, Tensor]:
    """The decoder's inputs, and the targets [B · S], on the decoder's device.

    The inputs are tokens [B, S], positions [B, S], and the bounds of documents unless
    `data.document_mask` is off.
    """
    device = decoder.device
    documents = None
    if config.data.document_mask:
        documents = group.documents(device)
    batch = TokenBatch(group.tokens.to(device), group.positions.to(device), documents)
    return batch, group.targets.flatten().to(device)
