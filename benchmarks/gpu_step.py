"""The cost of a training step: this project's methods against transformers and PEFT.

    python -m benchmarks.gpu_step --json benchmarks/out/gpu_step.json
    python -m benchmarks.gpu_step --cpu

It runs on one GPU, or with --cpu on the CPU. All models have random weights and train on the same
tokens, without activation checkpointing, with the loss and fused AdamW; 16-bit weights have fp32
masters, as under DeepSpeed. Left out: gradient accumulation and clipping, data loading, and
messages. The variants take turns in one process, so that load on the machine affects all of them
alike; who waits holds no memory. Widths are in the paper's proportions: hidden size, FFN and heads
grow by an eighth, and the rank of LoRA is an eighth of the hidden size. `adapt_own` has rows for a
quarter of the vocabulary's tokens and gains beside Adapt's width, `adapt_low_rank` differences of
rank 16 on every linear map, for which `peft_lora_16` is PEFT's LoRA of that rank.

Other processes on the machine lengthen some steps more than others: beside load, compare the least
time of a step (`seconds_min`) or, with --cpu, its processor time over all threads, and not the
median (`seconds_per_step`). Processor time with several threads counts those that wait for the
others, too: on a shared machine take --threads 1.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn

from benchmarks.results import (
    BASES,
    STORIES,
    Elapsed,
    Row,
    Stopwatch,
    eighth_of,
    make_parser,
    print_rows,
    write_rows,
)
from pipeline import command_line
from pipeline.config.base import BasePrecision
from pipeline.config.method import FullFineTuning, LlamaPro, Lora, Method, ScaleMethod
from pipeline.errors import ConfigError
from pipeline.methods import method_for, quantize_base
from pipeline.model.attention import Documents
from pipeline.model.causal_decoder import CausalDecoder
from pipeline.model.from_hf import read_spec
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.quantized import QuantizedPrecision, quantization_of
from pipeline.parallel.sharding import default_dtype
from pipeline.parallel.topology import SINGLE
from pipeline.sizing.flops import count_flops

_GIB = 2**30


class Shape(NamedTuple):
    """A base, by its config.json, and a batch of it. W12 is in the layers from `l_fp` on."""

    architecture: Path
    batch_size: int
    sequence_length: int
    l_fp: int


SHAPES = {
    "1b-8192": Shape(BASES / "llama-3.2-1b.json", 2, 8192, 3),
    "1b-4096": Shape(BASES / "llama-3.2-1b.json", 4, 4096, 3),
    "8b-4096": Shape(BASES / "llama-3.1-8b.json", 1, 4096, 6),
    "102m": Shape(BASES / "llama-102m.json", 4, 256, 6),
    # 64 experts, of which a token takes 8.
    "moe-96m": Shape(BASES / "qwen3-moe-96m.json", 4, 256, 3),
}
ON_A_GPU = ("1b-8192", "1b-4096", "8b-4096")
ON_A_CPU = ("102m", "moe-96m")
TINY = Shape(STORIES / "config.json", 1, 16, 2)
OURS = ("fft", "lora", "llama_pro", "preserve", "adapt", "adapt_own", "adapt_low_rank", "route")
OWN_WEIGHTS: dict[str, dict[str, Any]] = {
    "adapt_own": {"own_rows": {"min_count": 1}, "own_gains": True},
    "adapt_low_rank": {"low_rank": 16},
}
"""What methods have beside Adapt's width: weights of open tokens alone, as settings."""
QUANTIZATIONS = get_args(QuantizedPrecision)
QUANTIZED = ("preserve", "adapt", "lora")
"""Methods that are also measured with a base in 8 and in 4 bits."""
THEIRS = ("transformers_fft", "peft_lora", "peft_lora_16")


class Variant(NamedTuple):
    """What is measured.

    Attributes:
        method: one of OURS or THEIRS.
        compiled: with compiled layers.
        liger: with the kernels of Liger (THEIRS).
        base: the form in which a frozen base is stored (OURS).
    """

    method: str
    compiled: bool = False
    liger: bool = False
    base: BasePrecision = "bf16"

    def __str__(self) -> str:
        parts = [self.method]
        if self.base != "bf16":
            parts.append(self.base)
        if self.compiled:
            parts.append("compile")
        if self.liger:
            parts.append("liger")
        return " + ".join(parts)


def all_variants(*, compiled: bool) -> list[Variant]:
    """Every variant; the ones that take long to compile come last."""
    plain = [Variant(method) for method in (*OURS, *THEIRS)]
    with_liger = [Variant(method, liger=True) for method in THEIRS]
    quantized = [Variant(method, base=base) for base in QUANTIZATIONS for method in QUANTIZED]
    variants = [*plain, *with_liger, *quantized]
    if compiled:
        for method in ("adapt", "preserve", "fft", *THEIRS[:2], "route", "lora"):
            variants.append(Variant(method, compiled=True))
        for variant in quantized:
            variants.append(variant._replace(compiled=True))
    return variants


def our_method(method: str, spec: DecoderSpec, l_fp: int) -> Method:
    """The settings of `method` in the paper's proportions."""
    if method == "fft":
        return FullFineTuning(name="fft")
    if method == "lora":
        return Lora(name="lora", rank=spec.widths.hidden_size // 8)
    if method == "llama_pro":
        return LlamaPro(name="llama_pro", added_layers=max(1, spec.num_layers // 4))
    settings: dict[str, Any] = {"name": "scale", "expansion": eighth_of(spec)}
    settings |= OWN_WEIGHTS.get(method, {})
    settings["variant"] = "adapt" if method in OWN_WEIGHTS else method
    settings["l_fp"] = None if method == "preserve" else l_fp
    return ScaleMethod.model_validate(settings)


def our_model(
    method: str, spec: DecoderSpec, l_fp: int, base: BasePrecision = "bf16"
) -> CausalDecoder:
    """This project's model for `method`, its parameters unset."""
    # As if these tokens were frequent in the new text; methods without own rows ignore it.
    own_tokens = tuple(range(0, spec.vocab_size, 4))
    settings = our_method(method, spec, l_fp)
    model = method_for(settings, Path(), 0, own_tokens).build(spec, SINGLE, "none")
    if base != "bf16":
        quantize_base(model, base)
    return model


@torch.no_grad()
def set_randomly(parameter: Tensor) -> None:
    """Sets a matrix, quantised or not, to small random values, and a norm's gain to 1."""
    quantization = quantization_of(parameter)
    if quantization is not None:
        shape = quantization.rows, quantization.columns
        quantization.write(parameter, 0.02 * torch.randn(shape, device=parameter.device))
    elif parameter.dim() == 1:
        parameter.fill_(1.0)
    else:
        parameter.normal_(std=0.02)


def their_model(variant: Variant, shape: Shape, device: torch.device) -> nn.Module:
    """The model of transformers, with PEFT's adapters on every linear map for `peft_lora…`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    has_flash = device.type == "cuda" and importlib.util.find_spec("flash_attn") is not None
    config = AutoConfig.from_pretrained(
        shape.architecture, local_files_only=True, trust_remote_code=False
    )
    config.use_cache = False
    attention = "flash_attention_2" if has_flash else "sdpa"
    model: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=torch.get_default_dtype(), attn_implementation=attention
    )
    if variant.liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama(model=model)
    layers = model.get_submodule("model.layers")
    if variant.method.startswith("peft_lora"):
        from peft import LoraConfig, get_peft_model

        rank = 16 if variant.method == "peft_lora_16" else config.hidden_size // 8
        adapters = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    if variant.compiled:
        for layer in layers.children():
            layer.compile(backend=compiler(device))
    return model


def compiler(device: torch.device) -> str:
    """The backend of torch.compile.

    On a CPU, where compiled layers are tried and not measured, it is one that generates no code.
    """
    return "inductor" if device.type == "cuda" else "eager"


class Peak:
    """The most GPU memory that is taken from here on, beyond what is held already.

    A CPU's processes have no such figure: what one variant gives back, the next takes without a
    trace.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._held = torch.cuda.memory_allocated()

    def gib(self) -> float | None:
        """In GiB; None on a CPU."""
        if not self._on_gpu:
            return None
        return (torch.cuda.max_memory_allocated() - self._held) / _GIB


@cache
def flops_per_token(method: str, shape: Shape) -> float:
    """The FLOPs per token of one of our methods.

    Frozen parts count for what is computed of them.
    """
    with torch.device("meta"):
        model = our_model(method, read_spec(shape.architecture), shape.l_fp)
        flops = count_flops(model, shape.sequence_length)
    # Causal attention needs half of the pairs of tokens that were counted.
    return flops.matrix + flops.attention / 2


class Contender:
    """A variant's model, and what its turns showed.

    Between turns it holds no memory, but keeps what was compiled. One that has a `fault`, such as
    too little memory, gets no more turns.
    """

    def __init__(
        self, variant: Variant, shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.variant = variant
        self.shape = shape
        self.device = device
        self.dtype = dtype
        self.steps: list[Elapsed] = []
        self.peak_gib: float | None = None
        self.fault = ""
        if variant.liger:
            packages = ("liger_kernel", "triton")
            missing = [name for name in packages if importlib.util.find_spec(name) is None]
            if missing:
                self.fault = f"needs {', '.join(missing)}"
        self.trained_parameters = 0
        self.model: nn.Module | None = None

    def turn(self, steps: int) -> None:
        """Measures `steps` steps, after one that is not measured."""
        peak = Peak(self.device)
        try:
            if self.model is None:
                self._build()
            step = self._prepare()
            step()
            for _ in range(steps):
                self.steps.append(step())
        except torch.OutOfMemoryError:
            self.fault = "out of memory"
            self.model = None
        self._release()
        taken = peak.gib()
        if taken is not None:
            self.peak_gib = max(taken, self.peak_gib or 0.0)

    def _build(self) -> None:
        variant = self.variant
        shape = self.shape
        device = self.device
        theirs = variant.method in THEIRS
        spec = read_spec(shape.architecture)
        # On the device a base in 16 bits would be there first, and count for the peak.
        built_on = device if variant.base == "bf16" else torch.device("cpu")
        with built_on, default_dtype(self.dtype):
            if theirs:
                model = their_model(variant, shape, device)
            else:
                ours = our_model(variant.method, spec, shape.l_fp, variant.base)
                if variant.compiled:
                    ours.compile_layers(compiler(device))
                model = ours.to(device)
        tokens = torch.randint(spec.vocab_size, (shape.batch_size, shape.sequence_length))
        # A document a row: the work is that of transformers, by the kernel for packed documents.
        documents = Documents.of(torch.zeros_like(tokens)).moved(lambda tensor: tensor.to(device))
        tokens = tokens.to(device)

        def loss() -> Tensor:
            if theirs:
                value: Tensor = model(input_ids=tokens, labels=tokens).loss
                return value
            total: Tensor = model(tokens, tokens, None, documents).total
            return total / tokens.numel()

        self.model = model
        self._loss = loss
        self._sizes = [parameter.untyped_storage().nbytes() for parameter in model.parameters()]
        self.trained_parameters = sum(own.numel() for own in self._trained())

    def _trained(self) -> list[Tensor]:
        assert self.model is not None
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def _prepare(self) -> Callable[[], Elapsed]:
        """Gives the parameters memory and random values. Returns what makes and times a step."""
        assert self.model is not None
        for parameter, size in zip(self.model.parameters(), self._sizes, strict=True):
            parameter.untyped_storage().resize_(size)
            set_randomly(parameter)
        trained = self._trained()
        # 16-bit weights have fp32 masters, which the optimizer updates.
        has_masters = self.dtype != torch.float32
        masters = [own.detach().float() for own in trained] if has_masters else trained
        optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

        def step() -> Elapsed:
            self._synchronize()
            watch = Stopwatch()
            with torch.enable_grad():
                self._loss().backward()
            with torch.no_grad():
                for own, master in zip(trained, masters, strict=True):
                    gradient = own.grad
                    assert gradient is not None
                    own.grad = None
                    master.grad = gradient.to(master.dtype)
                optimizer.step()
                optimizer.zero_grad()
                if has_masters:
                    torch._foreach_copy_(trained, masters)
            self._synchronize()
            return watch.elapsed()

        return step

    def _synchronize(self) -> None:
        """Waits until a GPU has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _release(self) -> None:
        if self.model is None:
            return
        for parameter in self.model.parameters():
            parameter.grad = None
            parameter.untyped_storage().resize_(0)

    def row(self) -> Row:
        """The figures; TFLOP/s are of the work that is really done."""
        row: Row = {"variant": str(self.variant), "outcome": self.fault or "no time left"}
        if self.fault or not self.steps:
            return row
        all_seconds = [step.seconds for step in self.steps]
        seconds = statistics.median(all_seconds)
        rate = self.shape.batch_size * self.shape.sequence_length / seconds
        counted = COUNTED_AS.get(self.variant.method, self.variant.method)
        per_token = flops_per_token(counted, self.shape)
        row["outcome"] = "measured"
        row["tokens_per_second"] = rate
        row["tflops"] = per_token * rate / 1e12
        if self.peak_gib is not None:
            row["peak_memory_gib"] = self.peak_gib
        row["seconds_per_step"] = seconds
        row["seconds_min"] = min(all_seconds)
        row["seconds_max"] = max(all_seconds)
        if self.device.type == "cpu":
            # Beside a GPU, processors launch kernels and wait.
            row["cpu_seconds_per_step"] = min(step.cpu_seconds for step in self.steps)
        row["flops_per_token"] = per_token
        row["trained_parameters"] = self.trained_parameters
        return row


COUNTED_AS = {"transformers_fft": "fft", "peft_lora": "lora", "peft_lora_16": "lora"}
"""Methods of others, by ours that do the same work; of the adapters' rank that is little."""

RATIOS = (
    # The name of a ratio, the figure, and the variant that it is relative to.
    ("ratio_to_fft", "seconds_per_step", "fft"),
    ("ratio_to_fft_min", "seconds_min", "fft"),
    ("ratio_to_fft_cpu", "cpu_seconds_per_step", "fft"),
    ("ratio_to_fft_flops", "flops_per_token", "fft"),
    ("ratio_to_adapt_min", "seconds_min", "adapt"),
    ("ratio_to_adapt_cpu", "cpu_seconds_per_step", "adapt"),
    ("ratio_to_peft_lora", "seconds_per_step", "peft_lora"),
)


def rows_of(contenders: Sequence[Contender]) -> list[Row]:
    """The rows of the contenders, with their ratios to full fine-tuning and to PEFT's LoRA."""
    rows = {str(own.variant): own.row() for own in contenders}
    for name, figure, reference in RATIOS:
        of_reference = rows.get(reference, {}).get(figure)
        if of_reference is None:
            continue
        for row in rows.values():
            if figure in row:
                row[name] = row[figure] / of_reference
    return list(rows.values())


def columns_of(device: torch.device) -> list[str]:
    """The columns of the table: all figures would not fit on a screen; the JSON file has them."""
    if device.type == "cpu":
        figures = ["tokens_per_second", "seconds_per_step", "seconds_min", "cpu_seconds_per_step"]
        ratios = ["ratio_to_fft", "ratio_to_fft_min", "ratio_to_fft_cpu", "ratio_to_fft_flops"]
        ratios += ["ratio_to_adapt_min", "ratio_to_adapt_cpu"]
    else:
        figures = ["tokens_per_second", "tflops", "peak_memory_gib", "seconds_per_step"]
        figures += ["seconds_min", "seconds_max"]
        ratios = ["ratio_to_fft", "ratio_to_fft_min"]
    return ["variant", *figures, *ratios, "ratio_to_peft_lora", "trained_parameters", "outcome"]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--cpu", action="store_true", help="measure on the CPU, in fp32, without compiled layers"
    )
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny shapes in place of the large ones: tries every row",
    )
    parser.add_argument("--shape", nargs="+", choices=SHAPES, help="default: all of the device")
    parser.add_argument(
        "--variant", nargs="+", metavar="NAME", help='as the table names them: "adapt + compile"'
    )
    parser.add_argument(
        "--rounds", type=command_line.positive, default=3, help="turns of each variant; default 3"
    )
    parser.add_argument(
        "--steps", type=command_line.positive, default=3, help="measured steps a turn; default 3"
    )
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="a shape's time; then no turn begins"
    )
    parser.add_argument(
        "--threads", type=command_line.positive, help="default: all cores; 1 with --tiny"
    )
    options = parser.parse_args()
    if not options.cpu and not torch.cuda.is_available():
        raise ConfigError("no GPU: torch finds no CUDA device; --cpu measures on the CPU")
    threads = options.threads
    if threads is None:
        threads = 1 if options.tiny else len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    variants = wanted_variants(options)
    torch.manual_seed(0)
    gc.freeze()  # what was imported: every turn collects garbage
    measure(options, variants)


def wanted_variants(options: argparse.Namespace) -> list[Variant]:
    """The variants of --variant, or all. Raises ConfigError for a name that is none."""
    compiled = options.tiny or not options.cpu or bool(options.variant)
    variants = {str(variant): variant for variant in all_variants(compiled=compiled)}
    names = options.variant or list(variants)
    unknown = sorted(set(names) - variants.keys())
    if unknown:
        raise ConfigError(
            f"--variant: expected some of {', '.join(variants)}; found {', '.join(unknown)}"
        )
    return [variant for name, variant in variants.items() if name in names]


def measure(options: argparse.Namespace, variants: Sequence[Variant]) -> None:
    """Measures the variants on each shape, prints a table of each, and writes all rows."""
    device = torch.device("cpu" if options.cpu else "cuda")
    dtype = torch.float32 if options.cpu else torch.bfloat16
    name = "cpu" if options.cpu else torch.cuda.get_device_name()
    shape_names = options.shape
    if shape_names is None:
        shape_names = ON_A_CPU if options.cpu and not options.tiny else ON_A_GPU
    earlier: list[Row] = []
    for shape_name in shape_names:
        deadline = time.monotonic() + options.seconds
        torch._dynamo.reset()  # the same code for another size would count as compiled too often
        shape = TINY if options.tiny else SHAPES[shape_name]
        contenders = [Contender(variant, shape, device, dtype) for variant in variants]
        rows: list[Row] = []
        for _ in range(options.rounds):
            for own in contenders:
                if own.fault or time.monotonic() >= deadline:
                    continue
                own.turn(options.steps)
                rows = [{"shape": shape_name, **row} for row in rows_of(contenders)]
                # After every turn: a limit of time may end the process.
                write_rows(options, [*earlier, *rows], device=name, torch=torch.__version__)
        rows = [{"shape": shape_name, **row} for row in rows_of(contenders)]
        earlier += rows
        write_rows(options, earlier, device=name, torch=torch.__version__)
        print(f"{shape_name}:")
        print_rows(rows, columns_of(device))


if __name__ == "__main__":
    command_line.run(main)
