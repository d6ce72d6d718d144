"""Tokens a second of greedy generation on the CPU: a base, and its exports with and without a gate.

    make bench-generation
    python -m benchmarks.generation_speed --hidden-size 1024 --layers 8 --json benchmarks/out/generation.json
    python -m benchmarks.generation_speed --loading --hidden-size 2048 --layers 16 --dtype bf16

The models are a Llama with random weights, and what its expansion by an eighth (the paper's proportions) and by a half
becomes: a wider Llama, as stock exports are, and the scale format's two streams, without a gate, with one that never
opens and with one that opens at once; and four expansions by an eighth beside each other, none or one of which opens.
They take turns in one process, and the fastest turn of each counts, so that load on the machine changes little. The
scale format's models have the base's own matrices, in one memory: the same product takes up to a fifth longer where the
weights lie on other pages. A turn generates --new-tokens tokens after --prompt-tokens, for each of --batch texts. In a
batch, the gate also opens for one of them alone.

--loading measures instead how long the base and the four expansions beside it take from their files until every weight
has been read once, each in a process of its own and in turns, and what memory that process then has needed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks.results import Row, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.conversion.combine import base_entries
from pipeline.conversion.remote_code.configuration_scale import ScaleConfig
from pipeline.conversion.remote_code.configuration_scale_combined import CombinedConfig
from pipeline.conversion.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.conversion.remote_code.modeling_scale_combined import EXPANSIONS, CombinedForCausalLM, is_of_base
from pipeline.conversion.remote_code.scale_gate import ScaleGate

SHARES = (8, 2)
"""An expansion is one such part of each width."""
THRESHOLDS = {"gate shut": 1e30, "one open": 8.0, "gate open": -1e30}
OPENING = 63
"""The token for which all gates' scores are far above the second of these thresholds, in one text of a batch."""
SEVERAL = 4
"""How many expansions by the first of these shares are beside each other."""
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
    loading: bool = False,
    features: str = "token",
) -> dict[str, PreTrainedModel]:
    """The base and its exports by name, with random weights. Half as many key/value heads as heads.

    For `loading` only the base and the several expansions, in the memory that these need.
    """
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": vocab_size, "max_position_embeddings": CONTEXT}
    sizes |= {"head_dim": HEAD_DIM, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False}

    def widths(hidden_size: int) -> dict[str, int]:
        heads = hidden_size // HEAD_DIM
        of_heads = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
        return {"hidden_size": hidden_size, "intermediate_size": 3 * hidden_size, **of_heads}

    frequencies = (10000.0 ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)).tolist()
    rotary = {"frequencies": frequencies, "context": None, "attention_factor": 1.0, "long_frequencies": None}
    base = widths(hidden_size)
    made: dict[str, PreTrainedModel] = {"base": LlamaForCausalLM(LlamaConfig(**sizes, **base))}
    for share in SHARES[:1] if loading else SHARES:
        wider = widths(hidden_size + hidden_size // share)
        scale: dict[str, Any] = {
            **sizes,
            **{name: size if name.startswith("num") else base[name] for name, size in wider.items()},
            **{f"expansion_{name}": size - base[name] for name, size in wider.items()},
            "base_vocab_size": vocab_size,
            "l_fp": layers // 2,
            "collaborative_modules": ["attention", "ffn"],
            "norm_statistics": "base",
            "rotary": [rotary],
            "layer_rotary": [0] * layers,
            "gate_features": features,
        }
        if not loading:
            made[f"1/{share}, stock"] = LlamaForCausalLM(LlamaConfig(**sizes, **wider))
            made[f"1/{share}, scale"] = ScaleForCausalLM(ScaleConfig(**scale))
            made[f"1/{share}, gate shut"] = ScaleForCausalLM(ScaleConfig(**scale, gate_layer=layers // 2))
        if share == SHARES[0]:
            several = CombinedForCausalLM(CombinedConfig(**base_entries(scale)))
            for index in range(SEVERAL):
                several.expansions.append(ScaleForCausalLM(ScaleConfig(**scale, gate_layer=layers // 2)))
                several.names.append(str(index))
                several.pieces.append(range(vocab_size, vocab_size))
                several.share_base()
            several.set_active(several.names)
            made[f"{SEVERAL} x 1/{share}, gate shut"] = several
    for model in made.values():
        model.to(dtype).eval().set_attn_implementation("sdpa")
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
    for gate in (part for model in made.values() for part in model.modules() if isinstance(part, ScaleGate)):
        gate.weight.data.zero_()[0] = 1
        gate.std.data.fill_(1)
    of_base = made["base"]
    for model in made.values():
        if isinstance(model, ScaleForCausalLM):
            for layer, same in zip(model.layers, of_base.model.layers, strict=True):
                for name, matrix in MATRICES.items():
                    setattr(layer.get_submodule(name).base, "weight", same.get_submodule(matrix).weight)  # noqa: B010
            model.output.base = of_base.lm_head.weight
            model.embedding.base.weight.data[OPENING, 0] = 1e3
    several.share_base()
    made |= {name.replace("gate shut", state): model for name, model in made.items() for state in THRESHOLDS}
    return dict(sorted(made.items(), key=lambda pair: pair[0], reverse=True))


@torch.no_grad()
def seconds(name: str, model: PreTrainedModel, new_tokens: int, prompt_tokens: int, batch: int) -> float:
    """The time that one turn takes."""
    if (threshold := THRESHOLDS.get(name.partition(", ")[2])) is not None:
        # Of several expansions the first one's opens.
        for index, gate in enumerate(part for part in model.modules() if isinstance(part, ScaleGate)):
            gate.threshold = threshold if index == 0 else THRESHOLDS["gate shut"]
    prompt, start = torch.arange(prompt_tokens).remainder(32).repeat(batch, 1), time.perf_counter()
    if name.endswith("one open"):
        prompt[0, -1] = OPENING
    limits = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens}
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=0, **limits)
    assert found.shape[1] == prompt.shape[1] + new_tokens
    return time.perf_counter() - start


def measure(
    made: dict[str, PreTrainedModel], new_tokens: int, turns: int, prompt_tokens: int = 16, batch: int = 1
) -> list[Row]:
    """A row for each model: its fastest turn, tokens a second, and its time over the base's."""
    for name, model in made.items():
        seconds(name, model, 2, prompt_tokens, batch)  # warms up: memory, threads
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(turns):
        for name, model in made.items():
            taken[name].append(seconds(name, model, new_tokens, prompt_tokens, batch))
    return [
        {
            "model": name,
            "parameters": sum(parameter.numel() for parameter in made[name].parameters()),
            "seconds": min(own),
            "tokens_per_second": batch * new_tokens / min(own),
            "ratio_to_base": min(own) / min(taken["base"]),
        }
        for name, own in taken.items()
    ]


LOAD = """
import re, sys, time
from pathlib import Path
from pipeline.conversion.hf_folder import load_hf_model
def peak():
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1])
before, start = peak(), time.perf_counter()
model = load_hf_model(Path(sys.argv[1]))
for parameter in model.parameters():
    parameter.sum()
print([time.perf_counter() - start, (peak() - before) / 2**20])
"""


def write(made: dict[str, PreTrainedModel], folder: Path) -> dict[str, Path]:
    """The folders of the base and of the several expansions, as `scale-cpt combine` writes them, but for one file."""
    base, name, dtype = made["base"], f"{SEVERAL} x 1/{SHARES[0]}", made["base"].dtype
    several = made[f"{name}, gate shut"]
    base.save_pretrained(folder / "base")
    expansions = dict(zip(several.names, several.expansions, strict=True))
    for own, expansion in expansions.items():
        tensors = {key: tensor for key, tensor in expansion.state_dict().items() if not is_of_base(key)}
        (folder / "several" / EXPANSIONS / own).mkdir(parents=True)
        save_file(tensors, folder / "several" / EXPANSIONS / own / "model.safetensors", {"format": "pt"})
    several.config.expansions = {own: expansion.config.to_dict() for own, expansion in expansions.items()}
    several.config.dtype = dtype
    several.config.save_pretrained(folder / "several")
    tensors = {key: tensor for key, tensor in several.state_dict().items() if not key.startswith(EXPANSIONS)}
    save_file(tensors, folder / "several" / "model.safetensors", {"format": "pt"})
    return {"base": folder / "base", name: folder / "several"}


def measure_loading(folders: dict[str, Path], turns: int) -> list[Row]:
    """A row for each folder: its fastest turn, and its memory; both also over the base's."""
    taken: dict[str, list[list[float]]] = {name: [] for name in folders}
    for _ in range(turns):
        for name, folder in folders.items():
            command = [sys.executable, "-c", LOAD, str(folder)]
            ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            taken[name].append(json.loads(ran.stdout.splitlines()[-1]))
    least = {name: [min(figures) for figures in zip(*own, strict=True)] for name, own in taken.items()}
    return [
        {
            "model": name,
            "gib_of_weights": sum(file.stat().st_size for file in folders[name].rglob("*.safetensors")) / 2**30,
            "seconds": seconds,
            "seconds_to_base": seconds / least["base"][0],
            "gib": memory,
            "gib_to_base": memory / least["base"][1],
        }
        for name, (seconds, memory) in least.items()
    ]


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
    add("--gate-features", choices=["token", "token+running_mean"], default="token", help="what gates read")
    add("--turns", type=positive, default=5, help="of each model (default: 5)")
    add("--threads", type=positive, default=1, help="of torch (default: 1)")
    add("--loading", action="store_true", help="measure loading instead")
    options = parser.parse_args()
    step = 2 * HEAD_DIM * max(SHARES)
    if options.hidden_size % step:
        parser.error(f"--hidden-size: expected a multiple of {step}, found {options.hidden_size}")
    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    torch.set_default_dtype(dtype)
    sizes = (options.hidden_size, options.layers, options.vocab_size)
    made = models(*sizes, dtype, loading=options.loading, features=options.gate_features)
    if options.loading:
        with tempfile.TemporaryDirectory() as folder:
            folders = write(made, Path(folder))
            del made
            rows = measure_loading(folders, options.turns)
    else:
        if options.batch == 1:
            made = {name: model for name, model in made.items() if not name.endswith("one open")}
        rows = measure(made, options.new_tokens, options.turns, options.prompt_tokens, options.batch)
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    command_line.run(main)
