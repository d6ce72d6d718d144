"""A base with random weights, and its exports: what the benchmarks of generation and loading run.

The base is a Llama. Beside it are

- `1/8, …` and `1/2, …`: its expansion by an eighth (the paper's proportions) and by a half, as a
  wider Llama (`merged`), or as the scale format's two streams without a gate (`scale`) or with one;
- `4 x 1/8, …`: four gated expansions by an eighth beside each other;
- `open weights, …`: no width, but rows, gains and differences of rank 16 that only open tokens read;
- `hosted 1/8, …` and `hosted open weights, …`: the same widths and weights beside transformers' own
  modules, as a run with `base_code: transformers` exports them;
- `beside 1/8, …` and `beside open weights, …`: the same models as those without `beside`, by a trial
  of one runtime for all bases (`beside_llama.py`);
- `difference, …`: a packed difference of all weights in 4 bits, which is added to the base's once,
  or each time that a layer runs (`by layer`).

A model with a gate has a name for each state of it: see `THRESHOLDS`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.beside_llama import NORMS, BesideLlama
from pipeline.extensions.combination.combine import base_entries
from pipeline.extensions.hosted.export import config_entries
from pipeline.extensions.hosted.read_spec import hosted_spec_of
from pipeline.hf.remote_code.configuration_difference import DifferenceConfig
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.remote_code.configuration_scale_combined import CombinedConfig
from pipeline.hf.remote_code.configuration_scale_hosted import HostedScaleConfig
from pipeline.hf.remote_code.modeling_difference import DifferenceForCausalLM
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.modeling_scale_combined import CombinedForCausalLM
from pipeline.hf.remote_code.modeling_scale_hosted import HostedScaleForCausalLM
from pipeline.hf.remote_code.scale_gate import ScaleGate
from pipeline.open_weights import open_weights_in
from pipeline.scale.plan import ExpansionPlan, Widths

BASE = "base"
SHARES = (8, 2)
"""An expansion is one such part of each of the base's widths."""
SEVERAL = 4
"""How many expansions by the first of these shares are beside each other."""
OWN_WEIGHTS = "open weights"
HOSTED = "hosted "
"""How the names of models beside transformers' own modules begin."""
BESIDE = "beside "
"""How those of the trial begin."""
OWN_RANK = 16
DIFFERENCES = {"difference": "once", "difference by layer": "by_layer"}
"""Models with a packed difference, and when it is added to the base's weights."""

GATE_SHUT = "gate shut"
THRESHOLDS = {GATE_SHUT: 1e30, "one open": 8.0, "gate open": -1e30, "open by id": -1e30}
"""The states of a gate, and its threshold in each. `one open`: it opens for one text of a batch,
that with the token `OPENING`. `open by id`: that token, which all texts have, is open by its id,
so that a prompt is read once."""
OPENING = 63
"""The token whose score is far above the threshold of `one open`, and that of all others below."""
OPENING_STATE = 1e3
"""The first channel of its embedding, which is all that gates read."""

HEAD_DIM = 64
CONTEXT = 2048
WIDTH_STEP = 2 * HEAD_DIM * max(SHARES)
"""What a hidden size is a multiple of: an expansion has whole pairs of heads, which share a
key/value head."""
MATRICES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "ffn.gate": "mlp.gate_proj",
    "ffn.up": "mlp.up_proj",
    "ffn.down": "mlp.down_proj",
}
"""Of a layer: their names in the scale format, and Llama's."""


@dataclass(frozen=True)
class BaseSizes:
    """The sizes of the base."""

    hidden_size: int
    layers: int
    vocab_size: int

    def in_common(self) -> dict[str, Any]:
        """The entries of a config that all models share."""
        return {
            "num_hidden_layers": self.layers,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": CONTEXT,
            "head_dim": HEAD_DIM,
            "bos_token_id": None,
            "eos_token_id": None,
            "tie_word_embeddings": False,
        }


def read_sizes(parser: argparse.ArgumentParser, options: argparse.Namespace) -> BaseSizes:
    """The sizes that --hidden-size, --layers and --vocab-size give; ends the program where the
    first fits no expansion."""
    if options.hidden_size % WIDTH_STEP:
        parser.error(
            f"--hidden-size: expected a multiple of {WIDTH_STEP}, found {options.hidden_size}"
        )
    return BaseSizes(options.hidden_size, options.layers, options.vocab_size)


def widths(hidden_size: int) -> dict[str, int]:
    """The widths of a model. There are half as many key/value heads as heads."""
    heads = hidden_size // HEAD_DIM
    return {
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
    }


def base_config(sizes: BaseSizes) -> LlamaConfig:
    """The config of the base."""
    return LlamaConfig(**sizes.in_common(), **widths(sizes.hidden_size))


def models(
    sizes: BaseSizes,
    dtype: torch.dtype,
    *,
    features: str = "token",
    wanted: Sequence[str] = (),
) -> dict[str, PreTrainedModel]:
    """The base and its exports by name, with random weights.

    Args:
        sizes: of the base.
        dtype: of the weights.
        features: what gates read.
        wanted: the names of these models alone; the base is there in any case.
    """
    base = LlamaForCausalLM(base_config(sizes))
    set_random_weights(base, dtype)
    base.model.embed_tokens.weight.data[OPENING, 0] = OPENING_STATE
    made: dict[str, PreTrainedModel] = {BASE: base}
    for name, make in _makers(sizes, features).items():
        states = states_of(name, wanted)
        if not states:
            continue
        model = make()
        set_random_weights(model, dtype)
        if isinstance(model, DifferenceForCausalLM):
            model.base = base
        if isinstance(model, ScaleForCausalLM):
            _share_base(model, base)
            if name.startswith(BESIDE):
                model = BesideLlama.of(base, model)
        if isinstance(model, CombinedForCausalLM):
            model.share_base()
        if isinstance(model, HostedScaleForCausalLM):
            model.base.load_state_dict(base.state_dict(), assign=True)
        for state in states:
            made[state] = model
    return dict(sorted(made.items(), key=lambda pair: pair[0], reverse=True))


def names(sizes: BaseSizes) -> list[str]:
    """The names of all models, in all states of their gates."""
    found = [BASE]
    for name in _makers(sizes, "token"):
        found += states_of(name)
    return found


def states_of(name: str, wanted: Sequence[str] = ()) -> list[str]:
    """The names that a model has in the states of its gate, or those of them that are `wanted`."""
    states = [name]
    if name.endswith(GATE_SHUT):
        states = []
        for state in THRESHOLDS:
            # Where texts do not wait for the gate, or each is computed again anyway, it makes no
            # difference by what a prompt opens.
            if state != "open by id" or name.removeprefix(BESIDE).startswith("1/"):
                states.append(name.replace(GATE_SHUT, state))
    if not wanted:
        return states
    return [state for state in states if state in wanted]


def set_gates(model: PreTrainedModel, state: str) -> None:
    """Brings a model's gates into a state: a key of THRESHOLDS. Of several expansions the first
    one's alone opens."""
    gates = [module for module in model.modules() if isinstance(module, ScaleGate)]
    for index, gate in enumerate(gates):
        gate.threshold = THRESHOLDS[state if index == 0 else GATE_SHUT]
        if gate.is_open_id is not None:
            gate.is_open_id[OPENING] = state == "open by id"


def expansion_entries(sizes: BaseSizes, share: int) -> dict[str, Any]:
    """The entries of a ScaleConfig for the base and an expansion by one part in `share`, without a
    gate."""
    of_base = widths(sizes.hidden_size)
    of_all = widths(sizes.hidden_size + sizes.hidden_size // share)
    entries = sizes.in_common()
    for name, size in of_all.items():
        entries[f"expansion_{name}"] = size - of_base[name]
        # Of heads the format counts all, of widths the base's.
        entries[name] = size if name.startswith("num") else of_base[name]
    channels = torch.arange(0, HEAD_DIM, 2).float()
    rotary = {
        "frequencies": (1 / 10000.0 ** (channels / HEAD_DIM)).tolist(),
        "context": None,
        "attention_factor": 1.0,
        "long_frequencies": None,
    }
    entries |= {
        "base_vocab_size": sizes.vocab_size,
        "l_fp": sizes.layers // 2,
        "collaborative_modules": ["attention", "ffn"],
        "norm_eps": base_config(sizes).rms_norm_eps,
        "norm_statistics": "base",
        "rotary": [rotary],
        "layer_rotary": [0] * sizes.layers,
    }
    return entries


def gated(entries: dict[str, Any], features: str) -> dict[str, Any]:
    """The entries of such a model with a gate, which reads where W12 begins."""
    return entries | {"gate_layer": entries["l_fp"], "gate_features": features}


def several(entries: dict[str, Any]) -> CombinedForCausalLM:
    """SEVERAL expansions beside each other, each with these entries of a ScaleConfig."""
    base = base_entries(entries)
    model = CombinedForCausalLM(CombinedConfig(**base))
    vocab_size = entries["vocab_size"]
    for index in range(SEVERAL):
        model.expansions.append(ScaleForCausalLM(ScaleConfig(**entries)))
        model.names.append(str(index))
        model.new_tokens.append(range(vocab_size, vocab_size))
        model.share_base()
    model.set_active(model.names)
    return model


def set_random_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Random weights, and gates that read the first channel of the base's stream."""
    model.to(dtype).eval().set_attn_implementation("sdpa")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for module in model.modules():
        if isinstance(module, ScaleGate):
            module.weight[0] = 1


def _makers(sizes: BaseSizes, features: str) -> dict[str, Callable[[], PreTrainedModel]]:
    """What makes each of the models beside the base, by name; those with gates shut."""
    makers: dict[str, Callable[[], PreTrainedModel]] = {}
    for share in SHARES:
        wider = widths(sizes.hidden_size + sizes.hidden_size // share)
        entries = expansion_entries(sizes, share)
        with_gate = gated(entries, features)
        merged = LlamaConfig(**sizes.in_common(), **wider)
        makers[f"1/{share}, merged"] = partial(LlamaForCausalLM, merged)
        makers[f"1/{share}, scale"] = partial(ScaleForCausalLM, ScaleConfig(**entries))
        by_id = ScaleConfig(**with_gate, gate_open_ids=True)
        makers[f"1/{share}, {GATE_SHUT}"] = partial(ScaleForCausalLM, by_id)
        if share == SHARES[0]:
            makers[f"{SEVERAL} x 1/{share}, {GATE_SHUT}"] = partial(several, with_gate)
            own = _own_weights_entries(entries, features)
            own_config = ScaleConfig(**own)
            makers[f"{OWN_WEIGHTS}, {GATE_SHUT}"] = partial(ScaleForCausalLM, own_config)
            makers[f"{BESIDE}1/{share}, {GATE_SHUT}"] = partial(ScaleForCausalLM, by_id)
            makers[f"{BESIDE}{OWN_WEIGHTS}, {GATE_SHUT}"] = partial(ScaleForCausalLM, own_config)
            for name, of_model in {f"1/{share}": with_gate, OWN_WEIGHTS: own}.items():
                makers[f"{HOSTED}{name}, {GATE_SHUT}"] = partial(_hosted, sizes, of_model)
    for name, unpacked in DIFFERENCES.items():
        config = DifferenceConfig(
            text_config=base_config(sizes).to_dict(),
            bits=4,
            own_rows=64,
            unpacked=unpacked,
            gate_layer=min(2, sizes.layers),
            gate_features=features,
        )
        makers[f"{name}, {GATE_SHUT}"] = partial(DifferenceForCausalLM, config)
    return makers


def _own_weights_entries(entries: dict[str, Any], features: str) -> dict[str, Any]:
    """The entries of the base without an expansion, and open weights from the gate's layer on."""
    first_layer = min(2, entries["num_hidden_layers"])
    own = {
        "own_first_layer": first_layer,
        "own_rows": entries["vocab_size"] // 4,
        "own_gains": True,
        "own_rank": OWN_RANK,
        "gate_layer": first_layer,
        "gate_features": features,
    }
    return base_entries(entries) | own


def _hosted(sizes: BaseSizes, entries: dict[str, Any]) -> HostedScaleForCausalLM:
    """What these entries of a ScaleConfig say, beside transformers' own modules."""
    config = ScaleConfig(**entries)
    expansion: Widths | None = None
    if config.expansion_hidden_size:
        expansion = Widths(
            config.expansion_hidden_size,
            config.expansion_intermediate_size,
            config.expansion_num_attention_heads,
            config.expansion_num_key_value_heads,
        )
    plan = ExpansionPlan(
        expansion,
        config.num_hidden_layers,
        config.l_fp,
        frozenset[Any](config.collaborative_modules),
        own=open_weights_in(entries, tuple(range(config.own_rows - 1)) or None),
    )
    spec = hosted_spec_of(json.loads(base_config(sizes).to_json_string(use_diff=False)))
    gate = {name: value for name, value in entries.items() if name.startswith("gate_")}
    return HostedScaleForCausalLM(HostedScaleConfig(**config_entries(spec, plan), **gate))


def _share_base(model: Any, base: Any) -> None:
    """Gives a widened model the weights of its base, in one memory: the same product takes up to
    a fifth longer where the weights lie on other pages."""
    for layer, same in zip(model.layers, base.model.layers, strict=True):
        for name, of_base in (MATRICES | NORMS).items():
            layer.get_submodule(name).base.weight = same.get_submodule(of_base).weight
    model.final_norm.base.weight = base.model.norm.weight
    model.embedding.base.weight = base.model.embed_tokens.weight
    model.output.base = base.lm_head.weight
