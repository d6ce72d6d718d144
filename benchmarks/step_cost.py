"""The cost of a training step under each method, on the same base: wall time, CPU time and peak memory.

    python benchmarks/step_cost.py --json benchmarks/out/step_cost.json

Each method runs in its own process, which gives its peak memory. The processes take turns, one step each a round, so
that load on the machine affects all of them alike. LoRA is PEFT's, on the transformers model; the others are this
project's. Widths are in the paper's proportions: hidden size, FFN and heads grow by an eighth.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pipeline.config.method import ExpansionWidths, FullFineTuning, LlamaPro, Method, ScaleMethod
from pipeline.methods import method_for
from pipeline.model.decoder import Decoder
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.topology import SINGLE
from pipeline.scale.plan import Widths
from pipeline.sizing.flops import count_flops

METHODS = ("fft", "lora", "llama_pro", "preserve", "adapt", "route")


@dataclass(frozen=True)
class Size:
    """The base and the batch that every method is measured on."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    batch_size: int
    sequence_length: int
    threads: int
    device: str
    dtype: str

    @property
    def spec(self) -> DecoderSpec:
        """The base: a Llama."""
        return DecoderSpec(
            family="llama",
            vocab_size=self.vocab_size,
            num_layers=self.num_layers,
            widths=Widths(self.hidden_size, self.intermediate_size, self.num_attention_heads, self.num_key_value_heads),
            head_dim=self.hidden_size // self.num_attention_heads,
            norm="rmsnorm",
            norm_eps=1e-5,
            activation="silu",
            max_position_embeddings=self.sequence_length,
        )


def our_model(method: str, size: Size) -> Decoder:
    """This project's model for `method`, with values drawn at random."""
    widths = ExpansionWidths(
        hidden_size=size.hidden_size // 8,
        intermediate_size=size.intermediate_size // 8,
        num_attention_heads=size.num_attention_heads // 8,
    )
    half = size.num_layers // 2
    settings: dict[str, Method] = {
        "fft": FullFineTuning(name="fft"),
        "llama_pro": LlamaPro(name="llama_pro", added_layers=size.num_layers // 4),
        "preserve": ScaleMethod(name="scale", variant="preserve", expansion=widths),
        "adapt": ScaleMethod(name="scale", variant="adapt", expansion=widths, l_fp=half),
        "route": ScaleMethod(name="scale", variant="route", expansion=widths, l_fp=half),
    }
    return method_for(settings[method], Path(), seed=0).build(size.spec, SINGLE, "none")


def lora_model(size: Size) -> nn.Module:
    """PEFT's LoRA over every linear map of the transformers model, its rank an eighth of the hidden size."""
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        intermediate_size=size.intermediate_size,
        num_hidden_layers=size.num_layers,
        num_attention_heads=size.num_attention_heads,
        num_key_value_heads=size.num_key_value_heads,
        max_position_embeddings=size.sequence_length,
    )
    rank = size.hidden_size // 8
    return get_peft_model(LlamaForCausalLM(config), LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear"))


class Cost(NamedTuple):
    """Of one step. On a shared machine processor seconds (over all threads) say more than elapsed ones."""

    seconds: float
    cpu_seconds: float


def make_step(method: str, size: Size) -> tuple[nn.Module, Callable[[], Cost]]:
    """The model of `method`, and a function that makes one training step with it and returns its cost."""
    torch.manual_seed(0)
    lora = method == "lora"
    model: nn.Module = lora_model(size) if lora else our_model(method, size)
    model = model.to(device=size.device, dtype=getattr(torch, size.dtype))
    if not lora:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.02)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    tokens = torch.randint(size.vocab_size, (size.batch_size, size.sequence_length), device=size.device)

    def loss() -> Tensor:
        if lora:
            value: Tensor = model(input_ids=tokens, labels=tokens).loss
            return value
        total: Tensor = model(tokens, tokens).total
        return total / tokens.numel()

    def step() -> Cost:
        started, cpu_started = time.perf_counter(), time.process_time()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        if size.device == "cuda":
            torch.cuda.synchronize()
        return Cost(time.perf_counter() - started, time.process_time() - cpu_started)

    return model, step


def worker(method: str, size: Size, pipe: Connection) -> None:
    """Makes a step whenever asked; reports the peak memory that training took beyond an idle process."""
    torch.set_num_threads(size.threads)
    idle_mib = peak_mib(size.device)
    model, step = make_step(method, size)
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    pipe.send(trained)
    while pipe.recv():
        pipe.send(step())
    pipe.send(peak_mib(size.device) - idle_mib)


def peak_mib(device: str) -> float:
    """The most memory that this process has held, in MiB."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def predicted_flops(method: str, size: Size) -> float:
    """Matrix FLOPs a token: counted on the graph for our models; for LoRA 4N + 6 a parameter of the adapters."""
    with torch.device("meta"):
        if method != "lora":
            return count_flops(our_model(method, size), size.sequence_length).matrix
        base = count_flops(our_model("fft", size), size.sequence_length).matrix / 6
        adapters = sum(parameter.numel() for parameter in lora_model(size).parameters() if parameter.requires_grad)
    return 4 * base + 6 * adapters


def measure(size: Size, methods: list[str], rounds: int) -> list[dict[str, Any]]:
    """One row per method, with the median time over `rounds` steps after one warm-up step."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    processes = []
    trained: dict[str, int] = {}
    for method in methods:
        pipes[method], theirs = context.Pipe()
        process = context.Process(target=worker, args=(method, size, theirs), daemon=True)
        process.start()
        processes.append(process)
        trained[method] = pipes[method].recv()
    costs: dict[str, list[Cost]] = {method: [] for method in methods}
    for _ in range(rounds + 1):
        for method in methods:
            pipes[method].send(True)
            costs[method].append(pipes[method].recv())
    memory = {}
    for method in methods:
        pipes[method].send(False)
        memory[method] = pipes[method].recv()
    for process in processes:
        process.join()

    seconds = {method: [cost.seconds for cost in costs[method][1:]] for method in methods}
    median = {method: statistics.median(seconds[method]) for method in methods}
    cpu = {method: statistics.median(cost.cpu_seconds for cost in costs[method][1:]) for method in methods}
    flops = {method: predicted_flops(method, size) for method in methods}
    return [
        {
            "method": method,
            "seconds_per_step": median[method],
            "seconds_min": min(seconds[method]),
            "seconds_max": max(seconds[method]),
            "cpu_seconds_per_step": cpu[method],
            "cpu_ratio_to_fft": cpu[method] / cpu["fft"],
            "peak_memory_mib": memory[method],
            "flops_ratio_predicted": flops[method] / flops["fft"],
            "ratio_to_fft": median[method] / median["fft"],
            "ratio_to_lora": median[method] / median["lora"],
            "trainable_parameters": trained[method],
        }
        for method in methods
    ]


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the rows as a table."""
    columns = {
        "s/step": ("seconds_per_step", ".3f"),
        "min": ("seconds_min", ".3f"),
        "max": ("seconds_max", ".3f"),
        "x FFT": ("ratio_to_fft", ".2f"),
        "FLOPs": ("flops_ratio_predicted", ".2f"),
        "cpu x FFT": ("cpu_ratio_to_fft", ".2f"),
        "x LoRA": ("ratio_to_lora", ".2f"),
        "MiB": ("peak_memory_mib", ".0f"),
        "trained": ("trainable_parameters", ",d"),
    }
    print(f"{'method':<10}" + "".join(f"{title:>12}" for title in columns))
    for row in rows:
        print(f"{row['method']:<10}" + "".join(f"{row[name]:>12{form}}" for name, form in columns.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--intermediate-size", type=int, default=2048)
    parser.add_argument("--num-layers", type=int, default=12)
    parser.add_argument("--num-attention-heads", type=int, default=16)
    parser.add_argument("--num-key-value-heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=16000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=5, help="timed steps a method, after one that is not")
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = vars(parser.parse_args())
    rounds, output = arguments.pop("rounds"), arguments.pop("json")
    rows = measure(Size(**arguments), list(METHODS), rounds)
    print_table(rows)
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
