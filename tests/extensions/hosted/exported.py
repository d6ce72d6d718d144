"""Tiny bases of any hosted type, widened at random and exported in memory.

A run of the whole job takes seconds a type; `tests.extensions.hosted.test_export` does that for some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PretrainedConfig

from pipeline.extensions.hosted.decoder import HostedDecoder
from pipeline.extensions.hosted.discovery.tiny_copy import FIRST_SPECIAL_TOKEN, shrunk
from pipeline.extensions.hosted.export import config_entries
from pipeline.extensions.hosted.read_spec import hosted_spec_of
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.extensions.hosted.survey import entries_of
from pipeline.extensions.hosted.transformers_model import hosted_config, model_class_of
from pipeline.hf.config import gate_to_config
from pipeline.hf.remote_code.configuration_scale_hosted import HostedScaleConfig
from pipeline.hf.remote_code.modeling_scale_hosted import HostedScaleForCausalLM
from pipeline.methods.registry import method_for
from pipeline.model.from_hf import with_special_floats
from pipeline.model.open_weights import OwnRowOfToken
from pipeline.parallel.topology import SINGLE
from tests.extensions.gate.gates import Opens, random_gate
from tests.widened import SEED, scale_settings, shake

NOISE = 0.1
LAYERS = 4


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A small configuration of a type, with its kinds of layers where four layers have them."""
    entries = {**entries_of(model_type), **changes}
    config_class = CONFIG_MAPPING[model_type]
    fewer = {**entries, "num_hidden_layers": entries.get("num_hidden_layers", LAYERS)}
    if "text_config" in config_class.sub_configs:
        text = {"num_hidden_layers": LAYERS, **entries.get("text_config", {})}
        fewer = {**entries, "text_config": text}
    try:
        config = shrunk(config_class.from_dict(fewer))
        with torch.device("meta"):
            model_class, own_config = model_class_of(config)
            model_class(own_config)
    except Exception:  # noqa: BLE001 - a type may refuse another number of layers in any way
        config = shrunk(config_class.from_dict(entries))
    return config


def spec_of(config: PretrainedConfig) -> HostedSpec:
    values = orjson.loads(config.to_json_string(use_diff=False))
    return hosted_spec_of({**values, "model_type": config.model_type})


@torch.no_grad()
def tiny_decoder(spec: HostedSpec, *, own: bool = False) -> HostedDecoder:
    """A widened model whose weights are all random; with `own`, open tokens have all of their own
    that the base has a place for."""
    changes: dict[str, Any] = {}
    if own and spec.structure.has_one_stream:
        later = spec.structure.layers[1:]
        changes["open_rows"] = {"min_count": 1}
        changes["open_gains"] = any(layer.norms for layer in later)
        if any(layer.linear_maps for layer in later):
            changes["low_rank"] = 2
    settings = scale_settings("adapt", collaborative_modules="both", **changes)
    own_tokens = tuple(range(0, spec.vocab_size, 2)) if changes else None
    model = method_for(settings, Path("unread"), SEED, own_tokens).build(spec, SINGLE, "none")
    assert isinstance(model, HostedDecoder)
    _fill_base(model)
    for name, parameter in model.named_parameters():
        if not name.startswith("base."):
            parameter.zero_()
            if name.endswith("norm.weight"):
                parameter.fill_(1.0)
    shake(model, NOISE)
    return model.eval()


@torch.no_grad()
def _fill_base(model: HostedDecoder) -> None:
    """Gives the base transformers' own initial values, and random ones where these are zero."""
    torch.manual_seed(0)
    base: Any = model.base
    whole = type(base)(hosted_config(model.spec))
    for name, value in whole.named_parameters():
        parameter = base.get_parameter(name)
        parameter.copy_(value)
        if not value.any():
            parameter.normal_(std=0.05)
        elif value.dim() == 2:
            parameter.normal_(std=0.5 * value.shape[-1] ** -0.5)
    _copy_buffers(whole, base)


def _copy_buffers(source: nn.Module, target: nn.Module) -> None:
    for name, buffer in source.named_buffers():
        parent, _, leaf = name.rpartition(".")
        target.get_submodule(parent)._buffers[leaf] = buffer.clone()


@torch.no_grad()
def exported(model: HostedDecoder, opens: Opens | None = None) -> HostedScaleForCausalLM:
    """The export of a model, with a gate that opens so; None: without one."""
    spec = model.spec
    entries = config_entries(spec, model.plan)
    entries["base_config"] = with_special_floats(dict(entries["base_config"]))
    gate = None
    if opens is not None:
        gate = random_gate(model, texts(spec, 2, 24), opens=opens, layer=1)
        entries |= gate_to_config(gate)
    config = HostedScaleConfig(**entries, tie_word_embeddings=False, dtype="float32")
    export = HostedScaleForCausalLM(config).eval()
    for name, value in model.named_parameters():
        export.get_parameter(name).copy_(value)
    _copy_buffers(model.base, export.base)
    if export.own_input is not None:
        assert model.plan.own is not None and model.plan.own.tokens is not None
        rows = OwnRowOfToken(model.plan.own.tokens, spec.vocab_size).on(torch.device("cpu"))
        export.own_input.row_of_token.copy_(rows)
        export.output.row_of_token.copy_(rows)
    export.rotary.fill()
    if gate is not None:
        for name, tensor in gate.tensors.items():
            getattr(export.token_gate, name).copy_(tensor)
    return export


def base_alone(export: HostedScaleForCausalLM) -> Any:
    """The base of an export without its hooks, with the same tensors."""
    base: Any = export.base
    alone = type(base)(base.config).eval()
    alone.load_state_dict(base.state_dict(), assign=True)
    _copy_buffers(base, alone)
    return alone


def texts(spec: HostedSpec, rows: int, length: int) -> Tensor:
    """Ordinary tokens, int64 [rows, length]."""
    generator = torch.Generator().manual_seed(5)
    highest = min(FIRST_SPECIAL_TOKEN, spec.vocab_size)
    return torch.randint(20, highest, (rows, length), generator=generator)


def cache_of(output: Any) -> dict[str, Any]:
    """What a forward gave for the next one, by the name that its type has for it."""
    for name in ("past_key_values", "cache_params", "state"):
        if output.get(name) is not None:
            return {name: output[name]}
    return {}


@torch.no_grad()
def logits_in_turn(model: Any, tokens: Tensor, prompt: int) -> Tensor:
    """The logits of `tokens` where the first `prompt` are read at once, and the rest one by one."""
    output = model(tokens[:, :prompt], use_cache=True)
    found = [output.logits]
    for at in range(prompt, tokens.shape[1]):
        output = model(tokens[:, at : at + 1], use_cache=True, **cache_of(output))
        found.append(output.logits)
    return torch.cat(found, dim=1)
