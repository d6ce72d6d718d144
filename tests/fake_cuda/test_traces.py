"""What a CUDA device would stumble over, without one: mixed devices, waits, tensors of all pairs of
tokens."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.bases import CONFIGS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCH = Path(torch.__file__).parent

METHODS = ("preserve", "adapt", "route", "fft", "freeze", "lora", "llama_pro")
QUICK = [
    *(f"{method}/llama" for method in METHODS),
    *(
        f"adapt/llama/{option}"
        for option in ("fp32", "fp8", "nf4", "all", "collaborative", "kl", "new_tokens", "gate")
    ),
    *("fft/llama/kl", "route/llama/gate", "muon/llama", "adapt/llama/fp8/row"),
    "preserve/llama/own rows/own gains/low rank/all/kl",
    "adapt/llama/own rows/gate",
    "adapt/llama/own gains/gate",
    "adapt/llama/low rank/gate",
    "adapt/gemma2/own rows/own gains/low rank/gate",
    # Window, soft-capping, parallel residual, experts.
    *("adapt/mistral window", "adapt/gemma2", "adapt/neox", "adapt/qwen3_moe/aligned"),
    "adapt/qwen3_moe/aligned/shared experts",
    *(f"export/{options}" for options in ("adapt/cache", "adapt/cache/gate", "route/cache/gate")),
    "export/adapt/cache/gate/open weights",
    "adapt/hosted llama/export/static/gate",
    # A window, capped scores, and layers that are computed again.
    "adapt/hosted gemma2/all",
    # vLLM's class, up to its attention.
    *(f"vllm/{options}" for options in ("adapt", "adapt/gate", "route/gate")),
]
# torch.compile traces each layer, with FlexAttention's masks and scores.
COMPILED = ["adapt/gemma2/compiled"]
MIXTURES = ("mixtral", "olmoe", "qwen3_moe", "qwen2_moe", "glm4_moe", "solar_open", "exaone_moe")
DENSE = [name for name in CONFIGS if not name.startswith(MIXTURES)]
ALL = [
    *(f"{served}/gate/open weights" for served in ("export/adapt/cache", "vllm/adapt")),
    *(f"{method}/{name}" for name in DENSE for method in ("adapt", "route")),
    *(f"{method}/{name}/aligned" for name in MIXTURES for method in ("preserve", "adapt", "route")),
    *(
        f"{method}/qwen3_moe/aligned/shared experts/{option}"
        for method in ("preserve", "adapt", "route", "lora")
        for option in ("all", "kl", "nf4")
    ),
    *(
        f"{method}/llama/{precision}"
        for method in ("preserve", "route", "lora")
        for precision in ("fp8", "nf4")
    ),
    *(
        f"{method}/llama/{option}"
        for method in METHODS
        for option in ("all", "kl", "new_tokens", "fp32")
    ),
    *(
        f"adapt/llama/fp8/{options}"
        for options in ("gradients in e5m2", "gradients in bf16", "row/gradients in e5m2", "fp32")
    ),
    "preserve/llama/gate",
    "lora/llama/own rows/own gains/gate",
]
ONE_DOCUMENT = ("qwen3_next", "mamba")
"""Hosted bases in which documents of one row would see each other."""
HOSTED = [
    *(f"adapt/hosted llama/{option}" for option in ("gate", "all", "kl", "fp32")),
    *("adapt/hosted phi", "lora/hosted granite/own rows/own gains"),
    *(f"adapt/hosted {name}" for name in ("gpt2", "starcoder2/all", "gemma3")),
    *(f"adapt/hosted {name}/aligned" for name in ("qwen3_moe", "deepseek_v3", "ernie4_5_moe")),
    *(f"adapt/hosted {name}/whole rows" for name in ("gpt2", "gemma2", "gpt_oss")),
    *(f"{method}/hosted llama" for method in ("preserve", "lora")),
]
MASKED = "adapt/hosted gpt_oss"
"""A hosted base whose attention has sinks, which the kernels of native bases do not know."""
OPEN = "gate/own rows/own gains/low rank"
MASKS = ("masking_utils.py", "makes a tensor of all pairs of tokens")
PADDING = ("masking_utils.py", "host waits for a value")
HOST_INDEX = ("cache_utils.py", "takes a tensor of the host")
SOFT_CAPPED = ("models/gemma2/modeling_gemma2.py", "makes a tensor of all pairs of tokens")
WITH_SINKS = ("models/gpt_oss/modeling_gpt_oss.py", "makes a tensor of all pairs of tokens")
HOSTED_EXPORTS: dict[str, set[tuple[str, str]]] = {
    **{f"{method}/hosted llama/export": set() for method in ("preserve", "adapt")},
    "adapt/hosted llama/export/fp32/gate": set(),
    # It asks whether the mask that `generate` gives hides anything.
    f"preserve/hosted llama/export/masked/{OPEN}": {MASKS, PADDING},
    "lora/hosted granite/export/masked/gate/own rows/own gains": {MASKS, PADDING},
    f"adapt/hosted gemma2/export/masked/{OPEN}": {MASKS, SOFT_CAPPED},
    f"adapt/hosted gemma3/export/masked/{OPEN}": {MASKS},
    f"adapt/hosted gpt_oss/export/masked/{OPEN}": {MASKS, WITH_SINKS},
    f"adapt/hosted qwen3_moe/aligned/export/masked/{OPEN}": {MASKS, PADDING},
    f"adapt/hosted qwen3_next/aligned/export/{OPEN}": set(),
    f"preserve/hosted mamba/export/{OPEN}": set(),
    # What a CUDA graph captures.
    f"preserve/hosted llama/export/static/{OPEN}": set(),
    "lora/hosted granite/export/static/gate/own rows/own gains": set(),
    **{
        f"adapt/hosted {name}/aligned/export/static/{OPEN}": set()
        for name in ("phi", "gpt2", "qwen3_moe", "deepseek_v3", "ernie4_5_moe", "qwen3_next")
    },
    # A layer with a window asks for the place of its last token by a tensor made on the host.
    "adapt/hosted gemma3/export/static": {MASKS, HOST_INDEX},
    f"adapt/hosted gemma2/export/static/{OPEN}": {MASKS, HOST_INDEX, SOFT_CAPPED},
    f"adapt/hosted gpt_oss/export/static/{OPEN}": {MASKS, HOST_INDEX, WITH_SINKS},
}
"""By case, in which file transformers does what."""
DIFFERENCES = [
    f"difference/{unpacked}/{tokens}"
    for unpacked in ("once", "by_layer")
    for tokens in ("open", "closed")
]
ALL_COMPILED = [
    *(f"adapt/{name}/compiled" for name in DENSE),
    # `compile` is refused for mixtures in a run; where experts' widths are aligned they trace whole.
    *(f"adapt/{name}/aligned/compiled" for name in MIXTURES),
    *(f"{method}/llama/compiled" for method in METHODS if method != "adapt"),
    *(
        f"adapt/llama/{options}/compiled"
        for options in ("fp32", "fp8", "nf4", "all", "kl", "new_tokens")
    ),
    "adapt/llama/fp8/row/compiled",
    "adapt/llama/fp8/gradients in e5m2/all/keeps products/compiled",
    "adapt/llama/all/keeps attention/compiled",
    "adapt/mistral window/all/keeps products/compiled",
    "preserve/llama/own rows/own gains/low rank/all/kl/compiled",
]

ENGINES = [
    *(f"{zero}/adapt" for zero in ("zero1", "zero2", "zero3 tight")),
    "zero3 tight/lora",
    "zero1/fft/muon",
]
"""ZeRO's stage, the method, and perhaps an optimizer."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Traces cases in a process that was started with the device, and returns the faults of each."""
    device = tmp_path_factory.mktemp("device") / "device.so"
    command = [
        "g++",
        "-O0",
        "-shared",
        "-fPIC",
        "-std=c++20",
        f"-I{TORCH / 'include'}",
        str(HERE / "device.cpp"),
    ]
    command += [
        f"-L{TORCH / 'lib'}",
        "-ltorch_cpu",
        "-lc10",
        f"-Wl,-rpath,{TORCH / 'lib'}",
        "-o",
        str(device),
    ]
    subprocess.run(command, check=True, capture_output=True)

    def run(*cases: str, module: str = "trace") -> dict[str, list[str]]:
        compiled = all("compiled" in case.split("/") for case in cases)
        disabled = "0" if compiled else "1"
        environment = {**os.environ, "LD_PRELOAD": str(device), "TORCHDYNAMO_DISABLE": disabled}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-m", f"tests.fake_cuda.{module}", *cases],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert [result["case"] for result in results] == list(cases)
        for result in results:
            assert result["operations"] >= 50 or result["faults"], "nothing ran on the device"
        return {result["case"]: result["faults"] for result in results}

    return run


def with_faults(found: dict[str, list[str]]) -> dict[str, list[str]]:
    return {case: faults for case, faults in found.items() if faults}


def test_a_step_neither_waits_nor_mixes_devices(trace):
    assert with_faults(trace(*QUICK)) == {}


@pytest.mark.full
def test_neither_does_that_of_any_family_and_method(trace):
    assert with_faults(trace(*ALL)) == {}


@pytest.mark.full
def test_neither_does_that_of_a_hosted_base(trace):
    """Nor makes transformers masks, where the kernels of native bases attend."""
    assert with_faults(trace(*HOSTED, MASKED)) == {}


@pytest.mark.full
def test_transformers_asks_whether_rows_hold_several_documents(trace):
    """Of bases whose masks it makes: here where each document has a row of its own."""
    (faults,) = trace("adapt/hosted qwen3_next/aligned/whole rows").values()
    (wait,) = faults
    assert wait.startswith("the host waits for a value: pipeline/extensions/hosted/decoder.py")
    assert "output = body(" in wait


@pytest.mark.full
def test_an_export_of_a_hosted_base_has_transformers_own_faults_alone(trace):
    fault_of_library = re.compile(r"transformers: \S+ (.+): (\S+\.py):\d+: ")
    for case, faults in trace(*HOSTED_EXPORTS).items():
        found = set()
        for fault in faults:
            parts = fault_of_library.match(fault)
            assert parts, (case, fault)
            found.add((parts[2], parts[1]))
        assert found == HOSTED_EXPORTS[case], case


@pytest.mark.full
def test_rows_of_documents_are_split_on_the_host_for_bases_that_would_mix_them(trace):
    for faults in trace(*(f"adapt/hosted {name}" for name in ONE_DOCUMENT)).values():
        waits = [fault for fault in faults if fault.startswith("the host waits")]
        assert waits, faults
        assert all("documents.starts.tolist()" in fault for fault in waits), waits


@pytest.mark.full
def test_a_full_difference_asks_on_the_host_what_its_gate_opens(trace):
    """So a graph cannot capture it; nothing else waits, and no devices are mixed."""
    for case, faults in trace(*DIFFERENCES).items():
        assert faults, case
        for fault in faults:
            assert fault.startswith("the host waits for a value: pipeline/hf/remote_code/"), case
            assert ".any()" in fault or ".all()" in fault, case


def test_a_compiled_layer_is_one_graph_and_a_planted_break_is_seen(trace):
    planted = "adapt/llama/compiled/planted_break"
    found = trace(*COMPILED, planted)
    (fault,) = found.pop(planted)
    assert "ata-dependent" in fault and "pipeline/model/decoder_layer.py" in fault, fault
    assert with_faults(found) == {}


@pytest.mark.full
def test_deepspeeds_engine_waits_at_the_end_of_a_step_alone(trace):
    """There it asks whether the gradient norm is finite, to clip by it or to leave the step out."""
    found = trace(*ENGINES, module="engine")
    for case, (wait,) in found.items():
        assert wait.startswith("the host waits for a value: pipeline/training/engine.py"), case
        assert wait.endswith("self._engine.step()"), wait


@pytest.mark.full
def test_layers_of_every_family_and_method_are_one_graph_each(trace):
    assert with_faults(trace(*ALL_COMPILED)) == {}


def test_planted_faults_are_seen_with_their_line(trace):
    found = trace(
        "adapt/llama/planted_host_tensor",
        "adapt/llama/planted_wait",
        "adapt/qwen3_moe",
        "adapt/qwen3_moe/aligned/shared experts/counted",
        "adapt/hosted llama/export/static/gate/planted_wait/planted_host_tensor",
    )
    host, wait, experts, shared, export = found.values()
    check_has(host, "pipeline/scale_math.py")
    check_has(wait, "pipeline/model/decoder.py", "embedding_scale")
    # Experts whose widths no grouped product takes are multiplied one by one, and the host waits
    # for their counts.
    check_has(experts, "pipeline/parallel/experts.py", ".tolist()")
    # The number of rows of a rank's experts is known to the device alone, unless they are padded.
    check_has(shared, "pipeline/parallel/expert_rows.py", "int(ends[-1])")

    waits = [fault for fault in export if fault.startswith("the host waits")]
    check_has(
        waits, "pipeline/hf/remote_code/modeling_scale_hosted.py", "index == self.config.gate_layer"
    )
    host_tensors = [fault for fault in export if "takes a tensor of the host" in fault]
    check_has(host_tensors, "pipeline/hf/remote_code/scale_rotary.py")


def check_has(faults: list[str], *parts: str) -> None:
    """One of the faults has all these parts."""
    assert any(all(part in fault for part in parts) for fault in faults), (parts, faults)
