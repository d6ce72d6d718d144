"""The cost of a training step: this project's methods against transformers and PEFT, on one GPU or on the CPU.

    python -m benchmarks.gpu_step --json benchmarks/out/gpu_step.json
    python -m benchmarks.gpu_step --cpu

All models have random weights and train on the same tokens, without activation checkpointing, with the loss and
fused AdamW; 16-bit weights have fp32 masters, as under DeepSpeed. Left out: gradient accumulation and clipping, data
loading, and messages. The variants take turns in one process, so that load on the machine affects all of them alike;
who waits holds no memory. Widths are in the paper's proportions: hidden size, FFN and heads grow by an eighth, and
the rank of LoRA is an eighth of the hidden size.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from benchmarks.results import BASES, STORIES, Row, eighth_of, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.config.method import FullFineTuning, LlamaPro, Lora, Method, ScaleMethod
from pipeline.config.run import BasePrecision
from pipeline.errors import ConfigError
from pipeline.methods import method_for, quantize_base
from pipeline.model.attention import Documents
from pipeline.model.decoder import Decoder
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
    "moe-96m": Shape(
        BASES / "qwen3-moe-96m.json", 4, 256, 3
    ),  # 64 experts, of which a token takes 8
}
ON_A_GPU, ON_A_CPU = ("1b-8192", "1b-4096", "8b-4096"), ("102m", "moe-96m")
TINY = Shape(STORIES / "config.json", 1, 16, 2)
OURS = ("fft", "lora", "llama_pro", "preserve", "adapt", "route")
QUANTIZATIONS = get_args(QuantizedPrecision)
QUANTIZED = ("preserve", "adapt", "lora")
"""With a base in 8 and in 4 bits, too."""
THEIRS = ("transformers_fft", "peft_lora")


class Variant(NamedTuple):
    """A method, with or without compiled layers, (theirs) with or without the kernels of Liger, and (ours) the form in
    which a frozen base is stored."""

    method: str
    compiled: bool = False
    liger: bool = False
    base: BasePrecision = "bf16"

    def __str__(self) -> str:
        base = "" if self.base == "bf16" else f" + {self.base}"
        return (
            self.method
            + base
            + (" + compile" if self.compiled else "")
            + (" + liger" if self.liger else "")
        )


def all_variants(*, compiled: bool) -> list[Variant]:
    """The ones that take long to compile come last."""
    quantized = [Variant(method, base=base) for base in QUANTIZATIONS for method in QUANTIZED]
    variants = [Variant(method) for method in (*OURS, *THEIRS)]
    variants += [*(Variant(method, liger=True) for method in THEIRS), *quantized]
    if compiled:
        plain = [
            Variant(method) for method in ("adapt", "preserve", "fft", *THEIRS, "route", "lora")
        ]
        variants += [variant._replace(compiled=True) for variant in (*plain, *quantized)]
    return variants


def our_method(method: str, spec: DecoderSpec, l_fp: int) -> Method:
    """The settings of `method` in the paper's proportions."""
    if method == "fft":
        return FullFineTuning(name="fft")
    if method == "lora":
        return Lora(name="lora", rank=spec.widths.hidden_size // 8)
    if method == "llama_pro":
        return LlamaPro(name="llama_pro", added_layers=max(1, spec.num_layers // 4))
    lowest = None if method == "preserve" else l_fp
    settings = {"name": "scale", "variant": method, "expansion": eighth_of(spec), "l_fp": lowest}
    return ScaleMethod.model_validate(settings)


def our_model(method: str, spec: DecoderSpec, l_fp: int, base: BasePrecision = "bf16") -> Decoder:
    """This project's model for `method`, its parameters unset."""
    model = method_for(our_method(method, spec, l_fp), Path(), seed=0).build(spec, SINGLE, "none")
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
    """The model of transformers, with PEFT's adapters on every linear map for `peft_lora`."""
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
    if variant.method == "peft_lora":
        from peft import LoraConfig, get_peft_model

        rank = config.hidden_size // 8
        adapters = LoraConfig(r=rank, lora_alpha=rank, target_modules="all-linear")
        model = get_peft_model(model, adapters, autocast_adapter_dtype=False)
    if variant.compiled:
        for layer in layers.children():
            layer.compile(backend=compiler(device))
    return model


def compiler(device: torch.device) -> str:
    """The backend of torch.compile: on a CPU, where only its use is tried, one that generates no code."""
    return "inductor" if device.type == "cuda" else "eager"


class Peak:
    """The most GPU memory that is taken from here on, beyond what is held already.

    A CPU's processes have no such figure: what one variant gives back, the next takes without a trace.
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
        return (torch.cuda.max_memory_allocated() - self._held) / _GIB if self._on_gpu else None


@cache
def flops_per_token(method: str, shape: Shape) -> float:
    """Of one of our methods: frozen parts count as computed, and of the pairs of tokens those that are not hidden."""
    with torch.device("meta"):
        model = our_model(method, read_spec(shape.architecture), shape.l_fp)
        flops = count_flops(model, shape.sequence_length)
    return flops.matrix + flops.attention / 2


class Contender:
    """A variant's model and what its turns showed. Between turns it holds no memory, but keeps what was compiled.

    One that has a `fault`, such as too little memory, gets no more turns.
    """

    def __init__(
        self, variant: Variant, shape: Shape, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.variant, self.shape, self.device, self.dtype = variant, shape, device, dtype
        self.seconds: list[float] = []
        self.peak_gib: float | None = None
        missing = [
            name for name in ("liger_kernel", "triton") if importlib.util.find_spec(name) is None
        ]
        self.fault = f"needs {', '.join(missing)}" if variant.liger and missing else ""
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
            self.seconds += [step() for _ in range(steps)]
        except torch.OutOfMemoryError:
            self.fault, self.model = "out of memory", None
        self._release()
        self.peak_gib = max(
            (gib for gib in (self.peak_gib, peak.gib()) if gib is not None), default=None
        )

    def _build(self) -> None:
        variant, shape, device = self.variant, self.shape, self.device
        theirs = variant.method in THEIRS
        # On the device a base in 16 bits would be there first, and count for the peak.
        with device if variant.base == "bf16" else torch.device("cpu"), default_dtype(self.dtype):
            if theirs:
                model = their_model(variant, shape, device)
            else:
                ours = our_model(
                    variant.method, read_spec(shape.architecture), shape.l_fp, variant.base
                )
                if variant.compiled:
                    ours.compile_layers(compiler(device))
                model = ours.to(device)
        tokens = torch.randint(
            read_spec(shape.architecture).vocab_size, (shape.batch_size, shape.sequence_length)
        )
        # A document a row: the work is that of transformers, by the kernel for packed documents.
        documents = Documents.of(torch.zeros_like(tokens)).moved(lambda tensor: tensor.to(device))
        tokens = tokens.to(device)

        def loss() -> Tensor:
            if theirs:
                value: Tensor = model(input_ids=tokens, labels=tokens).loss
                return value
            total: Tensor = model(tokens, tokens, None, documents).total
            return total / tokens.numel()

        self.model, self._loss = model, loss
        self._sizes = [parameter.untyped_storage().nbytes() for parameter in model.parameters()]
        self.trained_parameters = sum(own.numel() for own in self._trained())

    def _trained(self) -> list[Tensor]:
        assert self.model is not None
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    @torch.no_grad()
    def _prepare(self) -> Callable[[], float]:
        """Gives the parameters memory and random values. Returns what makes a step, in seconds."""
        assert self.model is not None
        for parameter, size in zip(self.model.parameters(), self._sizes, strict=True):
            parameter.untyped_storage().resize_(size)
            set_randomly(parameter)
        trained = self._trained()
        masters = [own if own.dtype == torch.float32 else own.detach().float() for own in trained]
        optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)

        def synchronized() -> float:
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            return time.perf_counter()

        def step() -> float:
            started = synchronized()
            with torch.enable_grad():
                self._loss().backward()
            with torch.no_grad():
                for own, master in zip(trained, masters, strict=True):
                    assert own.grad is not None
                    gradient, own.grad = own.grad, None
                    master.grad = gradient.to(master.dtype)
                optimizer.step()
                optimizer.zero_grad()
                if masters[0] is not trained[0]:
                    torch._foreach_copy_(trained, masters)
            return synchronized() - started

        return step

    def _release(self) -> None:
        for parameter in self.model.parameters() if self.model else ():
            parameter.grad = None
            parameter.untyped_storage().resize_(0)

    def row(self) -> Row:
        """The figures; TFLOP/s are of the work that is really done."""
        row: Row = {"variant": str(self.variant), "outcome": self.fault or "no time left"}
        if self.fault or not self.seconds:
            return row
        counted = {"transformers_fft": "fft", "peft_lora": "lora"}.get(
            self.variant.method, self.variant.method
        )
        seconds = statistics.median(self.seconds)
        rate = self.shape.batch_size * self.shape.sequence_length / seconds
        per_token = flops_per_token(counted, self.shape)
        return row | {
            "outcome": "measured",
            "tokens_per_second": rate,
            "tflops": per_token * rate / 1e12,
            **({} if self.peak_gib is None else {"peak_memory_gib": self.peak_gib}),
            "seconds_per_step": seconds,
            "seconds_min": min(self.seconds),
            "seconds_max": max(self.seconds),
            "flops_per_token": per_token,
            "trained_parameters": self.trained_parameters,
        }


def rows_of(contenders: Sequence[Contender]) -> list[Row]:
    """Their rows, with the time over that of our full fine-tuning and of PEFT's LoRA."""
    rows = [own.row() for own in contenders]
    for name, of in (("ratio_to_fft", "fft"), ("ratio_to_peft_lora", "peft_lora")):
        reference = next(
            (row.get("seconds_per_step") for row in rows if row["variant"] == of), None
        )
        for row in rows:
            if reference and "seconds_per_step" in row:
                row[name] = row["seconds_per_step"] / reference
    return rows


TIMES = (
    "tokens_per_second",
    "tflops",
    "peak_memory_gib",
    "seconds_per_step",
    "seconds_min",
    "seconds_max",
)
COLUMNS = ("variant", *TIMES, "ratio_to_fft", "ratio_to_peft_lora", "trained_parameters", "outcome")


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
    torch.set_num_threads(options.threads or (1 if options.tiny else len(os.sched_getaffinity(0))))
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    device = torch.device("cpu" if options.cpu else "cuda")
    dtype = torch.float32 if options.cpu else torch.bfloat16
    names = options.shape or (ON_A_CPU if options.cpu and not options.tiny else ON_A_GPU)
    variants = all_variants(compiled=options.tiny or not options.cpu or bool(options.variant))
    if unknown := sorted(set(options.variant or ()) - {str(variant) for variant in variants}):
        raise ConfigError(
            f"--variant: expected some of {', '.join(map(str, variants))}; found {', '.join(unknown)}"
        )
    wanted = [
        variant for variant in variants if not options.variant or str(variant) in options.variant
    ]
    name = "cpu" if options.cpu else torch.cuda.get_device_name()
    rows: dict[str, list[Row]] = {}
    torch.manual_seed(0)
    gc.freeze()  # what was imported: every turn collects garbage

    def keep(shape: str, contenders: Sequence[Contender]) -> None:
        rows[shape] = [{"shape": shape, **row} for row in rows_of(contenders)]
        write_rows(
            options, list(chain.from_iterable(rows.values())), device=name, torch=torch.__version__
        )

    for shape_name in names:
        deadline = time.monotonic() + options.seconds
        torch._dynamo.reset()  # the same code for another size would count as compiled too often
        shape = TINY if options.tiny else SHAPES[shape_name]
        contenders = [Contender(variant, shape, device, dtype) for variant in wanted]
        for own in [own for _ in range(options.rounds) for own in contenders]:
            if not own.fault and time.monotonic() < deadline:
                own.turn(options.steps)
                keep(
                    shape_name, contenders
                )  # after every turn: a limit of time may end the process
        keep(shape_name, contenders)
        print(f"{shape_name}:")
        print_rows(rows[shape_name], COLUMNS)


if __name__ == "__main__":
    command_line.run(main)
