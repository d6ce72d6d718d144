"""Tokens a second of greedy generation on the CPU: a base, and its exports with and without a gate.

    make bench-generation
    python -m benchmarks.generation_speed --hidden-size 1024 --layers 8

The models are a Llama with random weights, and what its expansion by an eighth (the paper's
proportions) and by a half becomes: a wider Llama, as merged exports are, and the scale format's two
streams, without a gate, with one that never opens and with one that opens at once, by its score
(`gate open`: the prompt is computed a second time) or by an id of the prompt that is open by
definition (`open by id`: once), as in new languages most prompts have one; and four expansions by
an eighth beside each other, none or one of which opens; without any width, what open tokens have of
their own: rows, gains and differences of rank 16; and a packed difference of all weights in 4 bits,
which is added once, or each time that a layer runs. They take turns in one process, and the fastest
turn of each counts, by the clock and by processor time: the second holds on a machine that other
processes share. The scale format's models have the base's own matrices, in one memory: the same
product takes up to a fifth longer where the weights lie on other pages. A turn generates
--new-tokens tokens after --prompt-tokens, for each of --batch texts. In a batch, the gate also
opens for one of them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.results import (
    Elapsed,
    Row,
    Stopwatch,
    in_turns,
    make_parser,
    print_rows,
    write_rows,
)
from pipeline import command_line
from pipeline.combination.combine import base_entries
from pipeline.hf.remote_code.configuration_difference import DifferenceConfig
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.remote_code.configuration_scale_combined import CombinedConfig
from pipeline.hf.remote_code.modeling_difference import DifferenceForCausalLM
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.modeling_scale_combined import CombinedForCausalLM
from pipeline.hf.remote_code.scale_gate import ScaleGate

SHARES = (8, 2)
"""An expansion is one such part of each width."""
THRESHOLDS = {"gate shut": 1e30, "one open": 8.0, "gate open": -1e30, "open by id": -1e30}
OPENING = 63
"""The token for which all gates' scores are far above the second of these thresholds, in one text
of a batch; with the last one, all texts have it, and it is open by its id."""
SEVERAL = 4
"""How many expansions by the first of these shares are beside each other."""
DIFFERENCES = {"difference": "once", "difference by layer": "by_layer"}
"""Models with a packed difference, and when it is added to the base's weights."""
OWN_WEIGHTS = "own weights"
"""The name of the model whose open tokens have weights of their own."""
HEAD_DIM, CONTEXT = 64, 2048
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


def models(
    hidden_size: int,
    layers: int,
    vocab_size: int,
    dtype: torch.dtype,
    *,
    features: str = "token",
    wanted: Sequence[str] = (),
) -> dict[str, PreTrainedModel]:
    """The base and its exports by name, with random weights; `wanted`: these alone beside the base.
    Half as many key/value heads as heads.
    """
    sizes = _sizes(layers, vocab_size)
    base = LlamaForCausalLM(LlamaConfig(**sizes, **_widths(hidden_size)))
    _set_weights(base, dtype)
    base.model.embed_tokens.weight.data[OPENING, 0] = 1e3
    made: dict[str, PreTrainedModel] = {"base": base}
    for name, make in _makers(hidden_size, sizes, features).items():
        states = wanted_states(name, wanted)
        if not states:
            continue
        model = make()
        _set_weights(model, dtype)
        if isinstance(model, DifferenceForCausalLM):
            model.base = base
        if isinstance(model, ScaleForCausalLM):
            _share_matrices(model, base)
        if isinstance(model, CombinedForCausalLM):
            model.share_base()
        for state in states:
            made[state] = model
    return dict(sorted(made.items(), key=lambda pair: pair[0], reverse=True))


def wanted_states(name: str, wanted: Sequence[str] = ()) -> list[str]:
    """The rows of the table that the model `name` gives; `wanted`: of these alone."""
    rows = [name]
    if name.endswith("gate shut"):
        rows = []
        for state in THRESHOLDS:
            # Where texts do not wait for the gate, or each is computed again anyway, both are one.
            if state != "open by id" or name.startswith("1/"):
                rows.append(name.replace("gate shut", state))
    return [row for row in rows if not wanted or row in wanted]


def _sizes(layers: int, vocab_size: int) -> dict[str, Any]:
    """What all models have in common."""
    return {
        "num_hidden_layers": layers,
        "vocab_size": vocab_size,
        "max_position_embeddings": CONTEXT,
        "head_dim": HEAD_DIM,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": False,
    }


def _widths(hidden_size: int) -> dict[str, int]:
    heads = hidden_size // HEAD_DIM
    of_heads = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
    return {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, **of_heads}


def _makers(
    hidden_size: int, sizes: dict[str, Any], features: str
) -> dict[str, Callable[[], PreTrainedModel]]:
    """What makes each of the models beside the base."""
    layers = sizes["num_hidden_layers"]
    vocab_size = sizes["vocab_size"]
    frequencies = (10000.0 ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)).tolist()
    rotary = {
        "frequencies": frequencies,
        "context": None,
        "attention_factor": 1.0,
        "long_frequencies": None,
    }
    base = _widths(hidden_size)
    makers: dict[str, Callable[[], PreTrainedModel]] = {}

    def add(name: str, kind: Any, config: Any) -> None:
        makers[name] = lambda: kind(config)

    for share in SHARES:
        wider = _widths(hidden_size + hidden_size // share)
        scale: dict[str, Any] = {
            **sizes,
            **{
                name: size if name.startswith("num") else base[name] for name, size in wider.items()
            },
            **{f"expansion_{name}": size - base[name] for name, size in wider.items()},
            "base_vocab_size": vocab_size,
            "l_fp": layers // 2,
            "collaborative_modules": ["attention", "ffn"],
            "norm_statistics": "base",
            "rotary": [rotary],
            "layer_rotary": [0] * layers,
            "gate_features": features,
        }
        gated = scale | {"gate_layer": layers // 2}
        add(f"1/{share}, merged", LlamaForCausalLM, LlamaConfig(**sizes, **wider))
        add(f"1/{share}, scale", ScaleForCausalLM, ScaleConfig(**scale))
        gated_by_id = ScaleConfig(**gated, gate_open_ids=True)
        add(f"1/{share}, gate shut", ScaleForCausalLM, gated_by_id)
        if share == SHARES[0]:
            own = {
                "own_first_layer": min(2, layers),
                "own_rows": vocab_size // 4,
                "own_gains": True,
                "own_rank": 16,
            }
            # Widths of 0, as the base of several expansions has: nothing is added but `own`.
            without_width = base_entries(scale) | own
            without_width |= {"gate_layer": min(2, layers), "gate_features": features}
            add(f"{OWN_WEIGHTS}, gate shut", ScaleForCausalLM, ScaleConfig(**without_width))
            makers[f"{SEVERAL} x 1/{share}, gate shut"] = partial(_several, gated)
    # The entries of the base's config.json.
    text_config = LlamaConfig(**sizes, **base).to_dict()
    for name, unpacked in DIFFERENCES.items():
        config = DifferenceConfig(
            text_config=text_config,
            bits=4,
            own_rows=64,
            unpacked=unpacked,
            gate_layer=min(2, layers),
            gate_features=features,
        )
        add(f"{name}, gate shut", DifferenceForCausalLM, config)
    return makers


def _several(scale: dict[str, Any]) -> CombinedForCausalLM:
    """Several expansions beside each other; `scale`: the entries of the configuration of each."""
    model = CombinedForCausalLM(CombinedConfig(**base_entries(scale)))
    vocab_size = scale["vocab_size"]
    for index in range(SEVERAL):
        model.expansions.append(ScaleForCausalLM(ScaleConfig(**scale)))
        model.names.append(str(index))
        model.new_tokens.append(range(vocab_size, vocab_size))
        model.share_base()
    model.set_active(model.names)
    return model


def _set_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Random weights, and gates that read the first channel of the base's stream."""
    model.to(dtype).eval().set_attn_implementation("sdpa")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    for part in model.modules():
        if isinstance(part, ScaleGate):
            part.weight.data.zero_()[0] = 1
            part.std.data.fill_(1)


def _share_matrices(model: Any, base: Any) -> None:
    """Gives a widened model the matrices of its base, in one memory."""
    for layer, same in zip(model.layers, base.model.layers, strict=True):
        for name, matrix in MATRICES.items():
            layer.get_submodule(name).base.weight = same.get_submodule(matrix).weight
    model.embedding.base.weight = base.model.embed_tokens.weight
    model.output.base = base.lm_head.weight


@torch.no_grad()
def turn(
    name: str, model: PreTrainedModel, new_tokens: int, prompt_tokens: int, batch: int
) -> Elapsed:
    """The time that one turn takes."""
    if (threshold := THRESHOLDS.get(name.partition(", ")[2])) is not None:
        # Of several expansions the first one's opens.
        for index, gate in enumerate(
            part for part in model.modules() if isinstance(part, ScaleGate)
        ):
            gate.threshold = threshold if index == 0 else THRESHOLDS["gate shut"]
            if gate.is_open_id is not None:
                gate.is_open_id[OPENING] = name.endswith("open by id")
    prompt = torch.arange(prompt_tokens).remainder(32).repeat(batch, 1)
    if name.endswith("one open"):
        prompt[0, -1] = OPENING
    if name.endswith("open by id"):
        prompt[:, -1] = OPENING
    limits = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    watch = Stopwatch()
    found = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **limits
    )
    elapsed = watch.elapsed()
    assert found.shape[1] == prompt.shape[1] + new_tokens
    return elapsed


def measure(
    made: dict[str, PreTrainedModel],
    new_tokens: int,
    turns: int,
    prompt_tokens: int = 16,
    batch: int = 1,
) -> list[Row]:
    """A row for each model: its fastest turn, tokens a second, and its time over the base's."""
    for name, model in made.items():
        turn(name, model, 2, prompt_tokens, batch)  # warms up: memory, threads
    taken = in_turns(
        {
            name: partial(turn, name, model, new_tokens, prompt_tokens, batch)
            for name, model in made.items()
        },
        turns,
    )
    seconds = {name: min(one.seconds for one in own) for name, own in taken.items()}
    cpu_seconds = {name: min(one.cpu_seconds for one in own) for name, own in taken.items()}
    rows: list[Row] = []
    for name, model in made.items():
        rows.append(
            {
                "model": name,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "seconds": seconds[name],
                "cpu_seconds": cpu_seconds[name],
                "tokens_per_second": batch * new_tokens / seconds[name],
                "ratio_to_base": seconds[name] / seconds["base"],
                "ratio_to_base_cpu": cpu_seconds[name] / cpu_seconds["base"],
            }
        )
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    add, positive = parser.add_argument, command_line.positive
    add("--hidden-size", type=positive, default=1024, help="a multiple of 1024 (default: 1024)")
    add("--layers", type=positive, default=8, help="of each model (default: 8)")
    add("--vocab-size", type=positive, default=32000, help="of each model (default: 32,000)")
    add("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the weights (default: fp32)")
    add("--new-tokens", type=positive, default=32, help="of a turn (default: 32)")
    add("--prompt-tokens", type=positive, default=16, help="before them (default: 16)")
    add("--batch", type=positive, default=1, help="texts at a time (default: 1)")
    add(
        "--gate-features",
        choices=["token", "token+running_mean"],
        default="token",
        help="what gates read",
    )
    add("--turns", type=positive, default=5, help="of each model (default: 5)")
    add("--threads", type=positive, default=1, help="of torch (default: 1)")
    add("--model", nargs="+", metavar="NAME", help="beside the base; default: all of the table")
    options = parser.parse_args()
    step = 2 * HEAD_DIM * max(SHARES)
    if options.hidden_size % step:
        parser.error(f"--hidden-size: expected a multiple of {step}, found {options.hidden_size}")
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    torch.set_default_dtype(dtype)
    sizes = (options.hidden_size, options.layers, options.vocab_size)
    wanted = ["base"]
    common = _sizes(options.layers, options.vocab_size)
    for name in _makers(options.hidden_size, common, options.gate_features):
        wanted += wanted_states(name)
    if options.batch == 1:
        wanted = [name for name in wanted if not name.endswith("one open")]
    if options.model:
        unknown = sorted(set(options.model) - set(wanted))
        if unknown:
            parser.error(
                f"--model: expected some of {', '.join(wanted)}; found {', '.join(unknown)}"
            )
        wanted = options.model
    made = models(*sizes, dtype, features=options.gate_features, wanted=wanted)
    rows = measure(made, options.new_tokens, options.turns, options.prompt_tokens, options.batch)
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    command_line.run(main)
