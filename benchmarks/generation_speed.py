"""Tokens a second of greedy generation by a base and its exports, side by side on the CPU.

    make bench-generation
    python -m benchmarks.generation_speed --hidden-size 1024 --layers 8

All models have random weights (`random_exports.py` lists them). They take turns in one process; a
turn generates --new-tokens tokens after --prompt-tokens, for each of --batch texts. The fastest
turn of each counts, by the clock and by processor time. The second holds on a machine that other
processes share.

Rows of gated models, by what their gate does:

- `gate shut`: it never opens;
- `gate open`: it opens by the score of the prompt's tokens, which are then computed a second time;
- `open by id`: it opens by an id of the prompt that is open by definition, as in new languages most
  prompts have one, so that the prompt is computed once;
- `one open`: it opens for one text of a batch.
"""

from __future__ import annotations

from functools import partial

import torch
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from benchmarks import random_exports
from benchmarks.random_exports import BASE, OPENING, THRESHOLDS, read_sizes, set_gates
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

PROMPT_IDS = 32
"""Prompts repeat the ids below this one. OPENING is none of them."""


@torch.no_grad()
def turn(
    name: str, model: PreTrainedModel, new_tokens: int, prompt_tokens: int, batch: int
) -> Elapsed:
    """The time that one turn takes."""
    state = name.partition(", ")[2]
    if state in THRESHOLDS:
        set_gates(model, state)
    prompt = torch.arange(prompt_tokens).remainder(PROMPT_IDS).repeat(batch, 1)
    if state == "one open":
        prompt[0, -1] = OPENING
    if state == "open by id":
        prompt[:, -1] = OPENING
    watch = Stopwatch()
    found = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        do_sample=False,
        pad_token_id=0,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
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
    ways = {}
    for name, model in made.items():
        turn(name, model, 2, prompt_tokens, batch)  # warms up: memory, threads
        ways[name] = partial(turn, name, model, new_tokens, prompt_tokens, batch)
    taken = in_turns(ways, turns)
    seconds: dict[str, float] = {}
    cpu_seconds: dict[str, float] = {}
    for name, own in taken.items():
        seconds[name] = min(one.seconds for one in own)
        cpu_seconds[name] = min(one.cpu_seconds for one in own)
    rows: list[Row] = []
    for name, model in made.items():
        rows.append(
            {
                "model": name,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "seconds": seconds[name],
                "cpu_seconds": cpu_seconds[name],
                "tokens_per_second": batch * new_tokens / seconds[name],
                "ratio_to_base": seconds[name] / seconds[BASE],
                "ratio_to_base_cpu": cpu_seconds[name] / cpu_seconds[BASE],
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
    sizes = read_sizes(parser, options)
    wanted = random_exports.names(sizes)
    if options.batch == 1:
        wanted = [name for name in wanted if not name.endswith("one open")]
    if options.model:
        unknown = sorted(set(options.model) - set(wanted))
        if unknown:
            parser.error(
                f"--model: expected some of {', '.join(wanted)}; found {', '.join(unknown)}"
            )
        wanted = options.model

    torch.set_num_threads(options.threads)
    transformers_logging.set_verbosity_error()
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[options.dtype]
    torch.set_default_dtype(dtype)
    made = random_exports.models(sizes, dtype, features=options.gate_features, wanted=wanted)
    rows = measure(made, options.new_tokens, options.turns, options.prompt_tokens, options.batch)
    print_rows(rows)
    write_rows(options, rows)


if __name__ == "__main__":
    command_line.run(main)
