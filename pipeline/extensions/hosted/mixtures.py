"""How many parameters of a hosted base's mixtures a token does not use."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.transformers_model import hosted_config

EXPERTS_OF_A_TOKEN = (
    r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k_experts|moe_top_k|experts_per_token"
)
"""What configurations call the number of experts that a token takes."""


def idle_parameters(spec: HostedSpec, base: nn.Module) -> int:
    """The parameters of the experts that a token does not take, over all layers; 0 for a dense
    base, and for a type whose configuration does not say how many experts a token takes."""
    taken = _experts_of_a_token(spec)
    idle = 0
    for layer in spec.structure.layers:
        of_base = base.get_submodule(spec.structure.layer_name(layer))
        for block in layer.blocks:
            if block.kind == "ffn":
                for experts, parameters in _routed_experts(of_base.get_submodule(block.name)):
                    not_taken = 0
                    if taken is not None:
                        not_taken = max(0, experts - taken)
                    idle += parameters * not_taken // experts
    return idle


def _experts_of_a_token(spec: HostedSpec) -> int | None:
    """How many experts a token takes; None where the configuration has no number of that name."""
    values: dict[str, Any] = hosted_config(spec).get_text_config(decoder=True).to_dict()
    for name, value in values.items():
        if re.fullmatch(EXPERTS_OF_A_TOKEN, name) and isinstance(value, int):
            return value
    return None


def _routed_experts(block: nn.Module) -> Iterator[tuple[int, int]]:
    """For each mixture within a block, its number of experts, and of their parameters."""
    for module in block.modules():
        if isinstance(module, nn.ModuleList):
            yield len(module), sum(parameter.numel() for parameter in module.parameters())
            continue
        own = list(module.parameters(recurse=False))
        # Matrices of all experts are one tensor. That of a convolution is [channels, 1, width].
        stacked = [part for part in own if part.dim() == 3 and min(part.shape) > 1]
        if stacked:
            experts = len(stacked[0])
            # With their biases, [experts, out].
            yield experts, sum(part.numel() for part in own if len(part) == experts)
