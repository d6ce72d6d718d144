"""Runs steps on a CUDA device without values, and says what a real one would stumble over.

    LD_PRELOAD=device.so python -m tests.fake_cuda.trace adapt/llama route/neox

A case is METHOD/BASE, and perhaps options after them: adapt/llama/nf4/all. Prints a JSON object for
each: its faults, and how many operations on the device it saw. A fault is a tensor of the host in
an operation on the device, a copy between the two, a value that the host waits for, or a tensor of
all pairs of tokens. With the option `compiled` each layer is traced by torch.compile, forward and
backward, up to what a compiler for GPUs would get: a break of its graph is a fault, too.

With the option `export` a case is an export of METHOD on a hosted base, whose text grows token by
token in a cache of its own, or with the option `static` stands in a cache of fixed size. There a
fault is ours where the innermost line is the project's; otherwise it begins with `transformers:`,
and masks of all pairs of tokens count too.

An export of a full difference (`difference/once/open`, or `closed`) asks on the host what its gate
opens, and some bases that transformers computes (`hosted mamba`) wait too: there the host gets a
value for each wait and goes on. Masks of all pairs of tokens are no fault of hosted bases that
train without the kernels of native ones: transformers makes them.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import StaticCache
from transformers.initialization import no_init_weights
from transformers.utils import import_utils

from pipeline.config.base import BaseCode, GradientPrecision
from pipeline.config.method import Lora, Method
from pipeline.config.schedule import Schedule
from pipeline.extensions.hosted.export import config_entries
from pipeline.extensions.hosted.spec import HostedSpec
from pipeline.gating.gate import FittedGate
from pipeline.hf.remote_code.configuration_difference import DifferenceConfig
from pipeline.hf.remote_code.configuration_scale import ScaleConfig
from pipeline.hf.remote_code.configuration_scale_hosted import HostedScaleConfig
from pipeline.hf.remote_code.modeling_difference import DifferenceForCausalLM
from pipeline.hf.remote_code.modeling_scale import ScaleForCausalLM
from pipeline.hf.remote_code.modeling_scale_hosted import HostedScaleForCausalLM
from pipeline.methods.build_model import quantize_base
from pipeline.methods.registry import method_for
from pipeline.model import attention, output
from pipeline.model.attention import Documents
from pipeline.model.bases import read_spec
from pipeline.model.causal_decoder import ActivationCheckpointing, CausalDecoder
from pipeline.model.recomputation import KeptResults
from pipeline.model.spec import DecoderSpec
from pipeline.optimizers.muon import orthogonalised
from pipeline.parallel import experts, fused_cross_entropy, quantized
from pipeline.parallel.parameters import default_dtype
from pipeline.parallel.quantized import Fp8Recipe, QuantizedPrecision
from pipeline.parallel.topology import SINGLE, TensorParallel
from pipeline.sizing.imagined_ranks import imagined_expert_ranks
from pipeline.training.grouped_optimizer import make_optimizer
from tests.bases import CONFIGS
from tests.extensions.hosted.bases import hosted_config
from tests.serving.stand_ins import vllm_config, with_stand_ins
from tests.widened import METHODS, SEED, Watched, scale_settings, tensors

ROOT = Path(__file__).parents[2]
LIBRARY = Path(transformers.__file__).parent
DEVICE = torch.device("cuda", 0)
ROWS = 2
LENGTH = 251
"""A prime that is no width of any base here: two dimensions of this size are pairs of tokens."""
NEW_TOKENS = 5
OWN_WEIGHTS: dict[str, dict[str, Any]] = {
    "own rows": {"open_rows": {"min_count": 1}},
    "own gains": {"open_gains": True},
    "low rank": {"low_rank": 2},
}
"""By option, settings of what open tokens have of their own."""
HOSTED = "hosted "
"""How the name of a base begins that transformers computes; after it one of `hosted_config`."""

_SEEN_ON_A_GPU = ("_block_mask", "_scaled_dot_product")
"""Functions of ours that make tensors of all pairs of tokens here alone. What is compiled on a GPU
evaluates masks and scores block by block; and which kernel torch takes for rows of one document
depends on the kernels that it was built with. `make gpu` sees both."""
_CALLED_ATTENTION = "scaled_dot_product_attention("
"""How the line reads that calls torch's kernels in an export of a hosted base, for which the same
holds."""


@dataclass(frozen=True)
class Case:
    """What one step is traced for."""

    name: str
    method: str
    base: str
    options: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, name: str) -> Case:
        method, base, *options = name.split("/")
        return cls(name, method, base, frozenset(options))

    @property
    def is_hosted(self) -> bool:
        """Whether transformers computes the base."""
        return self.base.startswith(HOSTED)

    @property
    def is_hosted_export(self) -> bool:
        """Whether it is an exported model on such a base."""
        return self.is_hosted and "export" in self.options

    @property
    def is_captured(self) -> bool:
        """Whether a graph is captured of it: its model is compiled, which decides nothing on the
        host."""
        if self.is_hosted_export:
            return "static" in self.options
        return self.method in SERVED and self.answer is None

    @property
    def answer(self) -> int | None:
        """What the host gets where it waits for a value; None: the case ends there."""
        if self.is_hosted or "closed" in self.options:
            return 0
        if "open" in self.options:
            return 1
        return None


def spec_of(case: Case) -> DecoderSpec:
    """The base of a case, by a config.json, as a run reads it."""
    code: BaseCode = "native"
    if case.is_hosted:
        code = "transformers"
        config = hosted_config(case.base.removeprefix(HOSTED))
    else:
        config = copy.deepcopy(CONFIGS[case.base])
    if "aligned" in case.options:
        config.moe_intermediate_size = 32  # grouped products want multiples of 16 bytes
    with tempfile.TemporaryDirectory() as folder:
        config.to_json_file(Path(folder) / "config.json")
        spec = read_spec(Path(folder), code)
    if "new_tokens" in case.options:
        spec = replace(spec, new_tokens=NEW_TOKENS)
    return spec


def build(case: Case, spec: DecoderSpec) -> CausalDecoder:
    """The model as the engine builds it, in bf16, or in fp32 for which other kernels run."""
    recomputed = "none"
    for kind in get_args(ActivationCheckpointing):
        if kind in case.options:
            recomputed = kind
    dtype = torch.float32 if "fp32" in case.options else torch.bfloat16
    own_tokens = None
    if "own rows" in case.options:
        own_tokens = tuple(range(0, spec.vocab_size, 2))
    tp = SINGLE
    if "shared experts" in case.options:
        ranks = imagined_expert_ranks(2, Counter(), padded="counted" not in case.options)
        tp = TensorParallel(expert_parallel=ranks)
    with DEVICE, default_dtype(dtype):
        method = method_for(method_settings(case), Path("unread"), SEED, own_tokens)
        model = method.build(spec, tp, recomputed)
        for kept in get_args(KeptResults):
            if f"keeps {kept}" in case.options:
                model.kept_results = kept
        for precision in get_args(QuantizedPrecision):
            if precision in case.options:
                quantize_base(model, precision, recipe_of(case))
        if "kl" in case.options and case.method == "fft":
            model.add_reference()
    return model


def method_settings(case: Case) -> Method:
    """The settings of a case's method, with what its open tokens have of their own."""
    own: dict[str, Any] = {}
    for option, settings in OWN_WEIGHTS.items():
        if option in case.options:
            own |= settings
    if not own:
        return METHODS[case.method]
    if case.method == "lora":
        return Lora(name="lora", rank=2, alpha=4, **own)
    if case.method == "preserve":
        # Own weights begin with the collaborative layers, of which Preserve has none.
        own["open_first_layer"] = 1
    return scale_settings(case.method, **own)


def recipe_of(case: Case) -> Fp8Recipe:
    """How a base in fp8 is multiplied; the bases here are all small."""
    recipe = Fp8Recipe(skip_small=False)
    if "row" in case.options:
        recipe = replace(recipe, scaling="row")
    for gradient in get_args(GradientPrecision):
        if f"gradients in {gradient}" in case.options:
            recipe = replace(recipe, gradient=gradient)
    return recipe


def step(model: CausalDecoder, optimizer: torch.optim.Optimizer, case: Case) -> None:
    """A micro-batch forward and backward, the optimizer, and a validation batch."""
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.long, device=DEVICE)
    positions = torch.zeros_like(tokens)
    starts = torch.zeros(2 * ROWS + 1, dtype=torch.int32, device=DEVICE)
    documents: Documents | None = None
    if "whole rows" not in case.options:
        # Two documents a row. Batches are packed on the host, where these numbers are known.
        documents = Documents(torch.zeros_like(tokens), starts, (2,) * ROWS)
    # How many sequences train by KL, and on how many the base runs.
    kl_sequences = 1 if "kl" in case.options else 0
    losses = model(tokens, tokens, positions, documents, kl_sequences, kl_sequences)
    losses.total.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(tokens, tokens, positions, documents)
        if "gate" in case.options:
            model.gate = gate_of(model)
        model.hidden_states(tokens, positions, documents)
        model.gate = None


def gate_of(model: CausalDecoder) -> FittedGate:
    """A gate before the first layer with W12."""
    vector = torch.ones(2 * model.spec.widths.hidden_size, device=DEVICE)
    return FittedGate(1, "token+running_mean", 0 * vector, vector, vector, 0.0, 0.0)


def _export_config(case: Case) -> ScaleConfig:
    """An exported model: METHOD in place of the base of a case, and perhaps a gate."""
    options: dict[str, Any] = {}
    if case.base == "route":
        options["routed"] = True
    if "gate" in case.options:
        options["gate_layer"] = 1
    if "open weights" in case.options:
        own = {"own_rows": 9, "own_gains": True, "own_rank": 2}
        options |= {"own_first_layer": 1, **own}
    return ScaleConfig(l_fp=1, **options)


def export_step(case: Case) -> Callable[[], object]:
    """A token after a text, by an exported model with a cache of fixed size: what a CUDA graph
    captures."""
    config = _export_config(case)
    with DEVICE:
        model = ScaleForCausalLM(config).eval()
        tokens = torch.zeros(1, 24, dtype=torch.long)
        token = tokens[:, :1]
        cache = StaticCache(config=config, max_cache_len=64)

    @torch.no_grad()
    def decode() -> None:
        model(tokens, use_cache=False)
        if "cache" in case.options:
            cache.reset()
            model(tokens, past_key_values=cache)
            model(token, past_key_values=cache)

    return decode


def difference_step(case: Case) -> Callable[[], object]:
    """A token after a text, by an exported full difference: BASE says when it is unpacked."""
    config = DifferenceConfig(text_config=CONFIGS["llama"], own_rows=4, unpacked=case.base)
    with DEVICE:
        model = DifferenceForCausalLM(config).eval()
        tokens = torch.zeros(1, 24, dtype=torch.long)
        token = tokens[:, :1]

    @torch.no_grad()
    def decode() -> None:
        cache = model(tokens, use_cache=True).past_key_values
        model(token, past_key_values=cache)

    return decode


def vllm_step(case: Case) -> Callable[[], object]:
    """The logits of new tokens by the class for vLLM, which captures it in CUDA graphs; its
    attention is a stand-in."""
    config = _export_config(case)
    with with_stand_ins() as module, DEVICE:
        served = module.ScaleForVllm(vllm_config=vllm_config(config)).eval()
        tokens = torch.zeros(24, dtype=torch.long)
        positions = torch.zeros_like(tokens)

    @torch.no_grad()
    def serve() -> None:
        served.compute_logits(served(tokens, positions))

    return serve


SERVED: dict[str, Callable[[Case], Callable[[], object]]] = {
    "difference": difference_step,
    "export": export_step,
    "vllm": vllm_step,
}
"""Exported models, by what serves them."""


def training_step(case: Case, spec: DecoderSpec) -> Callable[..., object]:
    """One step of a case; the same model and optimizer at each call.

    With a `compiler` its layers are compiled.
    """
    model = build(case, spec)
    schedule = Schedule(steps=1, global_batch_size=ROWS, micro_batch_size=ROWS, learning_rate=1e-3)
    optimizer = make_optimizer(model, schedule)

    def run(compiler: Callable[..., Any] | None = None) -> None:
        if compiler is not None:
            plant(model, case)
            compiled = aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
            model.compile_layers(backend=compiled)
            step(model, optimizer, case)
            return
        step(model, optimizer, case)
        plant(model, case)

    return run


def plant(model: Any, case: Case) -> None:
    """Plants a fault for the second step, where a case asks for one: the trace must see it."""
    if "planted_host_tensor" in case.options:
        held = model.rotary._held
        for key in held:
            held[key] = held[key].cpu()
    if "planted_break" in case.options:
        model.layers[1].ffn.activation = lambda x: x if x.max() > 0 else -x
    if "planted_wait" in case.options:
        model.spec = replace(model.spec, embedding_scale=torch.ones((), device=DEVICE))


def hosted_export_step(case: Case, spec: DecoderSpec) -> Callable[[], object]:
    """A token after a prompt, by an exported model on a hosted base.

    With the option `masked` it is given the mask and the positions that `generate` gives.
    """
    assert isinstance(spec, HostedSpec)
    config = _hosted_export_config(case, spec)
    dtype = torch.float32 if "fp32" in case.options else torch.bfloat16
    with DEVICE, default_dtype(dtype), no_init_weights():
        model = HostedScaleForCausalLM(config).eval()
        tokens = torch.zeros(ROWS, LENGTH + 1, dtype=torch.long)
        mask = torch.ones_like(tokens)
        positions = torch.zeros_like(tokens)
        fixed = None
        if "static" in case.options:
            fixed = StaticCache(config=model.base.config, max_cache_len=2 * LENGTH)

    def inputs(begin: int, end: int) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": tokens[:, begin:end], "use_cache": True}
        if "masked" in case.options:
            given |= {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        return given

    @torch.no_grad()
    def decode() -> None:
        if fixed is not None:
            fixed.reset()
        prompt = model(**inputs(0, LENGTH), past_key_values=fixed, logits_to_keep=1)
        cache = {"past_key_values": getattr(prompt, "past_key_values", None)}
        if cache["past_key_values"] is None:
            cache = {"cache_params": prompt.cache_params}  # Mamba's name for it
        model(**inputs(LENGTH, LENGTH + 1), **cache)

    def run() -> None:
        decode()
        if "planted_host_tensor" in case.options:
            model.rotary.frequencies = torch.zeros_like(model.rotary.frequencies, device="cpu")
        if "planted_wait" in case.options:
            model.config.gate_layer = torch.ones((), dtype=torch.long, device=DEVICE)

    return run


def _hosted_export_config(case: Case, spec: HostedSpec) -> HostedScaleConfig:
    """The configuration that an export of a case has, and perhaps a gate."""
    with torch.device("meta"):
        plan = build(case, spec).plan
    assert plan is not None, "the methods that are exported have one"
    gate: dict[str, Any] = {}
    if "gate" in case.options:
        gate = {"gate_layer": 1, "gate_features": "token+running_mean", "gate_open_ids": True}
    values = config_entries(spec, plan)
    return HostedScaleConfig(**values, **gate, tie_word_embeddings=False)


def muon_step() -> Callable[[], object]:
    """Muon's products; putting matrices together needs ranks."""
    with DEVICE:
        matrices = torch.zeros(3, 20, 12)
    return lambda: orthogonalised(matrices)


class Faults:
    """Collects faults, each with the line of the project that made it."""

    def __init__(self, *, masks_of_pairs: bool = False, names_library: bool = False) -> None:
        """With `masks_of_pairs` tensors of all pairs of tokens are no fault; with `names_library` a
        fault of transformers' own code is named as its."""
        self.masks_of_pairs = masks_of_pairs
        self.names_library = names_library
        self.operations = 0
        self.found: list[str] = []

    def look(
        self, operation: Any, taken: list[Tensor], made: list[Tensor], where: str | None = None
    ) -> None:
        """One operation of torch, as `Watched` shows it; `where` is the line that called it, if it
        is not where we are."""
        on_device = [tensor for tensor in (*taken, *made) if tensor.device.type == "cuda"]
        if on_device:
            self.operations += 1
        # A number on the host is part of a kernel's arguments, and of an empty tensor there is
        # nothing to copy: transformers' caches begin with one.
        on_host = []
        for tensor in taken:
            if tensor.device.type == "cpu" and tensor.dim() > 0 and tensor.numel() > 0:
                on_host.append(tensor)
        if on_host and on_device:
            self.add(f"{operation} takes a tensor of the host", where=where)
        takes_from_device = any(tensor.device.type == "cuda" for tensor in taken)
        makes_on_host = any(tensor.device.type == "cpu" for tensor in made)
        if takes_from_device and makes_on_host:
            self.add(f"{operation} copies to the host", where=where)
        has_pairs = any(tuple(tensor.shape).count(LENGTH) > 1 for tensor in made)
        if has_pairs and not self.masks_of_pairs:
            self.add(f"{operation} makes a tensor of all pairs of tokens", where=where)

    def compile(self, graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """A compiler that looks at each operation of a layer's graph, forward or backward."""
        for node in graph.graph.nodes:
            if node.op != "call_function":
                continue
            taken = tensors([given.meta.get("val") for given in node.all_input_nodes])
            made = tensors(node.meta.get("val"))
            where = last_line(node.meta.get("stack_trace") or "")
            if node.target is torch.ops.aten._local_scalar_dense.default:
                self.add("the host waits for a value", where=where)
            self.look(node.target, taken, made, where)
        return make_boxed_func(graph.forward)

    def add(
        self,
        what: str,
        frames: traceback.StackSummary | None = None,
        *,
        where: str | None = None,
    ) -> None:
        """Adds a fault at the line `where`, or at the innermost line of the project among `frames`,
        by default of where we are."""
        if where is not None:
            self.found.append(f"{what}: {where}")
            return
        stack = traceback.extract_stack() if frames is None else frames
        makes_pairs = what.endswith("pairs of tokens")
        last = None
        for frame in stack:  # the innermost call comes last
            is_ours = _is_ours(frame.filename)
            if is_ours and makes_pairs and frame.name in _SEEN_ON_A_GPU:
                return
            if is_ours or (self.names_library and _is_library(frame.filename)):
                last = frame
        if last is None:
            self.found.append(f"{what}: no line of the project")
        elif self.names_library and makes_pairs and _CALLED_ATTENTION in (last.line or ""):
            return
        elif _is_library(last.filename):
            self.found.append(f"transformers: {what}: {_line(last, LIBRARY)}")
        else:
            self.found.append(f"{what}: {_line(last, ROOT)}")


def _line(frame: traceback.FrameSummary, root: Path) -> str:
    """A line of a file within `root`, with its number."""
    return f"{Path(frame.filename).relative_to(root)}:{frame.lineno}: {frame.line}"


def _is_ours(file: str) -> bool:
    """Whether a file is code of the project that runs on GPUs."""
    path = Path(file)
    return path.is_relative_to(ROOT / "pipeline") or path.is_relative_to(ROOT / "serving")


def _is_library(file: str) -> bool:
    """Whether a file is transformers' own."""
    return Path(file).is_relative_to(LIBRARY)


def last_line(stack: str) -> str | None:
    """The innermost line of the project in a stack as text; None without one."""
    found = re.findall(rf'File "{ROOT}/(pipeline/[^"]+)", line (\d+).*\n *(.*)', stack)
    if not found:
        return None
    path, number, line = found[-1]
    return f"{path}:{number}: {line}"


@contextmanager
def as_on_a_gpu(case: Case) -> Iterator[None]:
    """What a torch for CPUs answers otherwise than one for GPUs, or cannot be asked without values."""
    with pytest.MonkeyPatch.context() as patch:
        # FlexAttention's masks and scores are traced before its compiler, which needs a real GPU.
        patch.setattr(attention, "_compiled", lambda function: function)
        # The compiled loss is traced as it is written, too.
        patch.setattr(fused_cross_entropy, "_compiled", lambda function: function)
        patch.setattr(output, "compiles_by_default", lambda device: True)
        patch.setattr(experts, "has_grouped_product", lambda device, dtype: True)
        patch.setattr(quantized, "gpu_computes_in_fp8", lambda: True)
        # transformers asks before it takes the grouped product of a mixture.
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        # transformers asks tensors without values less than others.
        patch.setattr(import_utils, "is_fake_tensor", lambda _: False)
        if case.is_captured:
            patch.setattr(torch.compiler, "is_compiling", lambda: True)
        yield


def _makes_masks(case: Case, spec: DecoderSpec | None) -> bool:
    """Whether tensors of all pairs of tokens are no fault: of masks that transformers makes, and of
    rows of one document, for which a torch for CPUs has no fused kernel."""
    if not isinstance(spec, HostedSpec) or case.is_hosted_export:
        return False
    return spec.kernels_unsupported_reason is not None or "whole rows" in case.options


def traced(case: Case) -> Faults:
    """The faults of a case in its second step: the first also makes what later ones keep."""
    spec = None
    if case.method not in (*SERVED, "muon"):
        spec = spec_of(case)
    faults = Faults(
        masks_of_pairs=_makes_masks(case, spec),
        names_library=case.is_hosted_export,
    )
    with FakeTensorMode(), as_on_a_gpu(case):
        try:
            if spec is not None and case.is_hosted_export:
                run = hosted_export_step(case, spec)
            elif spec is not None:
                run = training_step(case, spec)
            elif case.method == "muon":
                run = muon_step()
            else:
                run = SERVED[case.method](case)
            if "compiled" in case.options:
                # The graphs of earlier cases count towards the compiler's limit.
                torch._dynamo.reset()
                run(faults.compile)
                return faults
            if case.answer is None:
                run()
            else:
                with WatchedKernels(faults, case.answer):
                    run()
                faults.found.clear()
            with WatchedKernels(faults, case.answer):
                run()
        except Exception as error:  # noqa: BLE001  # each is a fault of the case
            # What torch.compile cannot trace is named in its message.
            faults.add(
                f"{type(error).__name__}: {error}",
                traceback.extract_tb(error.__traceback__),
                where=last_line(str(error)),
            )
    return faults


class WatchedKernels(Watched):
    """Also lets FlexAttention through, whose parts are not operations of their own.

    With an `answer` a wait of the host is a fault, and the host gets the answer and goes on.
    """

    supports_higher_order_operators = True

    def __init__(self, faults: Faults, answer: int | None = None) -> None:
        super().__init__(faults.look)
        self.faults = faults
        self.answer = answer

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_wait = operation is torch.ops.aten._local_scalar_dense.default
        if is_wait and self.answer is not None:
            if args[0].is_cuda:
                self.faults.add("the host waits for a value")
            return float(self.answer) if args[0].is_floating_point() else self.answer
        return super().__torch_dispatch__(operation, types, args, kwargs)


def main() -> None:
    for name in sys.argv[1:]:
        faults = traced(Case.of(name))
        result = {
            "case": name,
            "operations": faults.operations,
            "faults": sorted(set(faults.found)),
        }
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
