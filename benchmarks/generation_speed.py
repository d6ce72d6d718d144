"""Tokens a second of greedy generation on the CPU: a base, its stock export, and its scale export.

    make bench-generation
    python benchmarks/generation_speed.py --hidden-size 1024 --layers 8 --json benchmarks/out/generation.json

The models are a Llama with random weights, and what its expansion by an eighth (the paper's proportions) becomes: a
wider Llama, as stock exports are, and the scale format's two streams. They take turns in one process, and the fastest
turn of each counts, so that load on the machine changes little. A turn generates --new-tokens tokens after a prompt,
without a batch.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from pipeline import command_line
from pipeline.conversion.modeling_scale import ScaleConfig, ScaleForCausalLM
from pipeline.evaluation.table import table
from pipeline.files import write_json
from pipeline.log import progress_bar

SHARE = 8
"""The expansion is one SHARE-th of each width."""
HEAD_DIM, CONTEXT = 64, 2048


def models(hidden_size: int, layers: int, vocab_size: int, dtype: torch.dtype) -> dict[str, PreTrainedModel]:
    """The base, its stock export and its scale export, with random weights. Half as many key/value heads as heads."""
    sizes: dict[str, Any] = {"num_hidden_layers": layers, "vocab_size": vocab_size, "max_position_embeddings": CONTEXT}
    sizes |= {"head_dim": HEAD_DIM, "bos_token_id": None, "eos_token_id": None}

    def llama(width: int) -> LlamaConfig:
        heads = width // HEAD_DIM
        return LlamaConfig(
            **sizes,
            hidden_size=width,
            intermediate_size=3 * width,
            num_attention_heads=heads,
            num_key_value_heads=heads // 2,
            tie_word_embeddings=False,
        )

    base, added = llama(hidden_size), hidden_size // SHARE
    stock = llama(hidden_size + added)
    scale = ScaleConfig(
        **sizes,
        hidden_size=hidden_size,
        intermediate_size=base.intermediate_size,
        num_attention_heads=stock.num_attention_heads,
        num_key_value_heads=stock.num_key_value_heads,
        expansion_hidden_size=added,
        expansion_intermediate_size=stock.intermediate_size - base.intermediate_size,
        expansion_num_attention_heads=stock.num_attention_heads - base.num_attention_heads,
        expansion_num_key_value_heads=stock.num_key_value_heads - base.num_key_value_heads,
        l_fp=0,
        collaborative_modules=["attention", "ffn"],
        norm_statistics="base",
        rotary=[_rotary()],
        layer_rotary=[0] * layers,
        tie_word_embeddings=False,
    )
    made: dict[str, PreTrainedModel] = {}
    for name, kind, config in (
        ("base", LlamaForCausalLM, base),
        ("stock", LlamaForCausalLM, stock),
        ("scale", ScaleForCausalLM, scale),
    ):
        config._attn_implementation = "sdpa"
        model = kind(config).to(dtype).eval()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        made[name] = model
    return made


def _rotary() -> dict[str, Any]:
    frequencies = (10000.0 ** -(torch.arange(0, HEAD_DIM, 2).float() / HEAD_DIM)).tolist()
    return {"frequencies": frequencies, "context": None, "attention_factor": 1.0, "long_frequencies": None}


@torch.no_grad()
def seconds(model: PreTrainedModel, prompt: torch.Tensor, new_tokens: int) -> float:
    """The time that one turn takes."""
    start = time.perf_counter()
    whole = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    assert whole.shape[1] == prompt.shape[1] + new_tokens
    return time.perf_counter() - start


def measure(made: dict[str, PreTrainedModel], new_tokens: int, turns: int) -> list[dict[str, Any]]:
    """A row for each model: its fastest turn, tokens a second, and its time over the base's."""
    prompt = torch.arange(1, 17).unsqueeze(0)
    fastest = dict.fromkeys(made, float("inf"))
    with progress_bar("generating", turns * len(made), "turns") as bar:
        for turn in range(turns + 1):
            for name, model in made.items():
                if turn == 0:  # warms up: memory, threads
                    seconds(model, prompt, 2)
                    continue
                fastest[name] = min(fastest[name], seconds(model, prompt, new_tokens))
                bar.update(1)
    return [
        {
            "model": name,
            "parameters": sum(parameter.numel() for parameter in made[name].parameters()),
            "seconds": time_of,
            "tokens_per_second": new_tokens / time_of,
            "ratio_to_base": time_of / fastest["base"],
        }
        for name, time_of in fastest.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--hidden-size", type=command_line.positive, default=1024, help="default 1024, or its multiples"
    )
    parser.add_argument("--layers", type=command_line.positive, default=8, help="default 8")
    parser.add_argument("--vocab-size", type=command_line.positive, default=32000, help="default 32,000")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--new-tokens", type=command_line.positive, default=32, help="of a turn; default 32")
    parser.add_argument("--turns", type=command_line.positive, default=5, help="of each model; default 5")
    parser.add_argument("--threads", type=command_line.positive, default=1, help="default 1")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    if arguments.hidden_size % (2 * HEAD_DIM * SHARE):
        parser.error(f"--hidden-size: expected a multiple of {2 * HEAD_DIM * SHARE}, found {arguments.hidden_size}")
    torch.set_num_threads(arguments.threads)
    transformers_logging.set_verbosity_error()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    made = models(arguments.hidden_size, arguments.layers, arguments.vocab_size, dtype)
    rows = measure(made, arguments.new_tokens, arguments.turns)
    lines = [
        [row["model"], f"{row['parameters']:,}", f"{row['tokens_per_second']:.2f}", f"{row['ratio_to_base']:.2f}"]
        for row in rows
    ]
    print(table(["model", "parameters", "tokens/s", "x base"], lines))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        settings = {name: str(value) for name, value in vars(arguments).items()}
        write_json(arguments.json, {"settings": settings, "rows": rows})


if __name__ == "__main__":
    command_line.run(main)
