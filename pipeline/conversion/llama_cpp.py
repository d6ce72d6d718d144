"""The real llama.cpp, where it is installed: its converter writes GGUF files, and its engine computes with them.

Needs the packages llama-cpp-python and gguf, and the environment variable LLAMA_CPP: a folder with llama.cpp's sources,
which hold convert_hf_to_gguf.py. Those that llama-cpp-python is built from will do.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from pipeline.conversion.precisions import Score
from pipeline.errors import ConversionError, faults_of_library
from pipeline.files import read_object

CONVERTED = ("f32", "bf16", "f16", "q8_0")
"""The formats that the converter writes."""
_QUANTIZED = {"q4_k_m": 15}
"""Those that the engine makes of an f16 file, by their `llama_ftype` in llama.h."""
FORMATS = (*CONVERTED, *_QUANTIZED)
_CONVERTER = "convert_hf_to_gguf.py"


def why_missing() -> str | None:
    """What to do for llama.cpp to be used; None: nothing."""
    missing = [package for module, package in _PACKAGES.items() if find_spec(module) is None]
    if missing:
        return f"pip install {' '.join(missing)}"
    if not (_sources() / _CONVERTER).is_file():
        return f"set LLAMA_CPP to a folder of llama.cpp's sources, with {_CONVERTER}"
    return None


_PACKAGES = {"llama_cpp": "llama-cpp-python", "gguf": "gguf"}


def _sources() -> Path:
    return Path(os.environ.get("LLAMA_CPP", "/nowhere"))


def write_gguf(folder: Path, path: Path, format: str) -> None:
    """Writes `path`, the Hugging Face folder `folder` in one of FORMATS.

    Raises:
        ConversionError: llama.cpp cannot convert it, or it names code of its own, which the converter would run.
    """
    for name in ("config.json", "tokenizer_config.json"):
        with suppress(FileNotFoundError):
            if "auto_map" in read_object(folder / name, ConversionError):
                raise ConversionError(f"{folder / name}: names code (auto_map), which llama.cpp's converter would run")
    made = path if format in CONVERTED else path.with_name(f"{path.name}.f16")
    command = [sys.executable, str(_sources() / _CONVERTER), str(folder), "--outfile", str(made)]
    command += ["--outtype", format if format in CONVERTED else "f16"]
    # A tokenizer may name a file of the hub.
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ConversionError(f"{folder}: llama.cpp cannot convert it to {format}: {last:.300}")
    if made != path:
        _quantize(made, path, format)
        made.unlink()


def _quantize(source: Path, path: Path, format: str) -> None:
    import llama_cpp

    settings = llama_cpp.llama_model_quantize_default_params()
    settings.ftype = _QUANTIZED[format]
    logging.getLogger("llama-cpp-python").setLevel(logging.ERROR)
    code = llama_cpp.llama_model_quantize(os.fsencode(source), os.fsencode(path), settings)
    if code != 0:
        raise ConversionError(f"{source}: llama.cpp cannot quantise it to {format}: code {code}")


@contextmanager
def engine(path: Path, context: int) -> Iterator[Score]:
    """llama.cpp's engine on the GGUF file `path`, for windows of at most `context` tokens: one thread, on the CPU.

    Raises:
        ConversionError: it cannot load the file.
    """
    import llama_cpp

    with faults_of_library(f"{path}: llama.cpp cannot load it", ConversionError):
        model = llama_cpp.Llama(str(path), n_ctx=context, n_threads=1, n_gpu_layers=0, logits_all=True, verbose=False)

    def score(window: Tensor) -> Tensor:
        model.reset()
        model.eval(window.tolist())
        return torch.from_numpy(model.scores[: len(window)].copy())

    try:
        yield score
    finally:
        model.close()
