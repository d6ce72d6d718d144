"""What becomes of the products of a base's output map, and which states the map reads.

Some bases multiply the products, some divide them, some cap them, and only the numbers are in
config.json. So every formula that its numbers allow is tried on the tiny copy, until one of them
gives its logits to the last bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from pipeline.errors import BaseModelError
from pipeline.extensions.hosted.discovery.tiny_copy import FIRST_SPECIAL_TOKEN
from pipeline.extensions.hosted.spec import LogitScale
from pipeline.extensions.hosted.structure import HostedStructure
from pipeline.extensions.hosted.transformers_model import first_entry

_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""The names that types give to the number by which they cap logits."""


@dataclass(frozen=True)
class OutputFormula:
    """How a base makes logits of its last hidden states.

    Attributes:
        body: the module whose `last_hidden_state` the output map reads.
        scale: the constant factor of the map's products.
        softcap: the number by which the scaled products are capped; None: they are not.
    """

    body: str
    scale: LogitScale
    softcap: float | None


@torch.no_grad()
def find_output_formula(
    tiny: Any, structure: HostedStructure, config: PretrainedConfig
) -> OutputFormula:
    """Finds the output's formula on a tiny copy of the base, where it must hold to the last bit.

    Raises:
        BaseModelError: the output map reads other states than the last hidden ones, or its products
            become logits by a formula that is not known.
    """
    tokens = torch.arange(24).view(2, 12) * 5 % FIRST_SPECIAL_TOKEN
    seen: dict[str, Tensor] = {}

    def keep(_: nn.Module, arguments: tuple[Tensor, ...], products: Tensor) -> None:
        seen["states"] = arguments[0]
        seen["products"] = products

    handle = tiny.get_submodule(structure.output).register_forward_hook(keep)
    logits = tiny(input_ids=tokens, use_cache=False).logits
    handle.remove()
    body = _body_name(tiny, structure, tokens, seen["states"])
    for scale, softcap in _formulas(config):
        found = seen["products"].float()
        # x / c and x * (1 / c) round differently: only one of them is equal to the last bit.
        found = found / scale.factor if scale.divides else found * scale.factor
        if softcap is not None:
            found = torch.tanh(found / softcap) * softcap
        if torch.equal(found, logits.float()):
            return OutputFormula(body, scale, softcap)
    raise BaseModelError(
        f"{structure.output}: its products become logits by a formula that is not known; use "
        "another base"
    )


def _body_name(tiny: Any, structure: HostedStructure, tokens: Tensor, states: Tensor) -> str:
    """The name of the module whose last hidden states the output map reads.

    Raises:
        BaseModelError: the map reads other states.
    """
    around_layers, _, _ = structure.layer_list.rpartition(".")
    candidates = [tiny.base_model, tiny.get_decoder(), tiny.get_submodule(around_layers)]
    names = {module: name for name, module in tiny.named_modules()}
    for module in candidates:
        # For some types transformers names the model itself, or a map, as its body.
        if module is tiny or not isinstance(module, PreTrainedModel):
            continue
        found = getattr(module(input_ids=tokens, use_cache=False), "last_hidden_state", None)
        if found is not None and torch.equal(found, states):
            return names[module]
    raise BaseModelError(
        "the output map reads other states than the last hidden ones of the base's body; use "
        "another base"
    )


def _formulas(config: PretrainedConfig) -> Iterator[tuple[LogitScale, float | None]]:
    """What a base may do to the products of its output map, by the numbers of its config."""
    text = config.get_text_config(decoder=True)
    softcap = first_entry(text, *_SOFTCAPS)
    yield LogitScale(), None
    if softcap:
        yield LogitScale(), softcap
    numbers: set[float] = set()
    for name, value in text.to_dict().items():
        is_scale = "logit" in name or "multiplier" in name
        if is_scale and type(value) in (int, float) and value:
            numbers.add(float(value))
    for number in sorted(numbers):
        for divides in (False, True):
            yield LogitScale(number, divides), None
            if softcap:
                yield LogitScale(number, divides), softcap
