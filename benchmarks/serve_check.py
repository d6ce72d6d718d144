"""A merged export and its base in llama.cpp: what f16 and Q8_0 change of their perplexities.

    make serve-check LLAMA_CPP=../llama.cpp EXPORT=exported BASE=models/mine TEXT=texts.jsonl
    python -m benchmarks.serve_check --llama-cpp ../llama.cpp --export exported --base models/mine

llama.cpp is a checkout that was built (cmake -B build && cmake --build build --target
llama-perplexity). Its own convert_hf_to_gguf.py converts both folders, in the Python of this
command: pip install gguf there. Then its llama-perplexity scores them. The reference is
transformers in fp32 on the same windows, as llama-perplexity cuts them: after the token that begins
a document, the second half of each window is scored.

The check passes if what llama.cpp changes of the export's perplexity is within 1 % of what it
changes of the base's. The exit code is 1 if not, and where llama.cpp's f16 changes the base itself
by more, because it cuts the text into other tokens.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F

from benchmarks.results import DATA, Row, make_parser, print_rows, write_rows
from pipeline import command_line
from pipeline.data.sources.records import Keys
from pipeline.data.tokenize.documents import good_documents
from pipeline.errors import ConfigError, ConversionError
from pipeline.files.publishing import write_text
from pipeline.hf.load import load_hf_model
from pipeline.hf.served_tokenizer import served_tokenizer
from pipeline.model.output import perplexity

TYPES: tuple[str, ...] = ("f16", "q8_0")
"""The types of llama.cpp's converter that are compared."""
TOLERANCE = 0.01
"""By how much the export's change may differ from the base's, as a share of the perplexity."""
CONTEXT = 128
"""Tokens of a window."""
STORIES_TEXT = DATA / "en" / "stories.heldout.jsonl.zst"
MAX_BYTES = 2**15
"""How much text is scored."""
_CONVERTER = "convert_hf_to_gguf.py"
_PROGRAM = "llama-perplexity"
_ESTIMATE = re.compile(r"Final estimate: PPL = ([\d.]+)")


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--llama-cpp", type=Path, required=True, help="a checkout of llama.cpp that was built"
    )
    parser.add_argument("--export", type=Path, required=True, help="a merged export")
    parser.add_argument(
        "--base",
        type=Path,
        required=True,
        help="its base, whose tokenizer llama.cpp must read as transformers does (not the demo's)",
    )
    parser.add_argument(
        "--text",
        default=str(STORIES_TEXT),
        help="documents to score (default: the demo's, English)",
    )
    parser.add_argument(
        "--context",
        type=int,
        default=CONTEXT,
        help=f"tokens of a window (default: {CONTEXT})",
    )
    options = parser.parse_args()
    base = measure("base", options.base, options)
    export = measure("export", options.export, options)
    rows = [base, export]
    print_rows(rows)
    write_rows(options, rows)
    faults = judged(base, export)
    for fault in faults:
        print(f"FAILED: {fault}")
    return 1 if faults else 0


def measure(name: str, model: Path, options: argparse.Namespace) -> Row:
    """The perplexity of a model by transformers in fp32, and by llama.cpp in each type."""
    converter, program = tools_in(options.llama_cpp)
    text = scored_text(options.text)
    reference = transformers_perplexity(model, text, options.context)
    row: Row = {"model": name, "transformers_fp32": reference}
    with TemporaryDirectory() as scratch:
        text_file = Path(scratch) / "text.txt"
        write_text(text_file, text)
        for kind in TYPES:
            converted = Path(scratch) / f"{name}.{kind}.gguf"
            convert = [sys.executable, str(converter), str(model), "--outtype", kind]
            run([*convert, "--outfile", str(converted)])
            found = llama_perplexity(program, converted, text_file, options.context)
            row[kind] = found
            row[f"{kind}_change"] = found / reference - 1
            # A model in f16 may be large: one file at a time.
            converted.unlink()
    return row


def scored_text(documents: str) -> str:
    """The beginning of the documents, as one text."""
    beginning = good_documents([documents], Keys(), max_bytes=MAX_BYTES)
    return "\n".join(document.whole_text for document in beginning)


def tools_in(checkout: Path) -> tuple[Path, Path]:
    """The converter and the program of a checkout of llama.cpp.

    Raises:
        ConfigError: one of them is not there.
    """
    converter = checkout / _CONVERTER
    if not converter.exists():
        raise ConfigError(f"{checkout}: expected a checkout of llama.cpp, found no {_CONVERTER}")
    # Where CMake puts it, and where older makefiles did.
    for program in (checkout / "build" / "bin" / _PROGRAM, checkout / _PROGRAM):
        if program.exists():
            return converter, program
    raise ConfigError(
        f"{checkout}: holds no {_PROGRAM}; build it there: cmake -B build && "
        f"cmake --build build --target {_PROGRAM}"
    )


def judged(base: Row, export: Row) -> list[str]:
    """What llama.cpp changes more of the export's perplexity than of the base's.

    The reference is transformers. Where llama.cpp changes the base's own perplexity even in f16, it
    cuts the text into other tokens, and figures of an export say nothing.
    """
    reference = "transformers_fp32"
    base_change = base[TYPES[0]] / base[reference] - 1
    # Written so that a NaN is no agreement.
    if not abs(base_change) <= TOLERANCE:
        return [
            f"{TYPES[0]}: the base's own perplexity changes by {base_change:+.2%}, expected within "
            f"{TOLERANCE:.0%}: llama.cpp cuts the text into other tokens than transformers, so "
            "nothing can be said of the export; take a base whose tokenizer llama.cpp reads"
        ]
    faults: list[str] = []
    for kind in TYPES:
        # What llama.cpp itself changes, by rounding and by its kernels, is in both.
        of_base = base[kind] / base[reference]
        of_export = export[kind] / export[reference]
        if not abs(of_export / of_base - 1) <= TOLERANCE:
            faults.append(
                f"{kind}: the export's perplexity changes by {of_export - 1:+.2%}, the base's by "
                f"{of_base - 1:+.2%}; expected within {TOLERANCE:.0%}"
            )
    return faults


@torch.no_grad()
def transformers_perplexity(folder: Path, text: str, context: int) -> float:
    """The perplexity as llama-perplexity computes it.

    The text is cut into windows of `context` tokens, whose first is replaced by the token that
    begins a document. Positions from the middle of the window on are scored; an incomplete window
    is left out.
    """
    # In fp32: in 16 bits the reference would be rounded as what it is the reference of.
    model = load_hf_model(folder, torch.float32)
    tokenizer = served_tokenizer(folder)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    total = 0.0
    count = 0
    for window in ids.split(context):
        if len(window) < context:
            break
        # llama-perplexity overwrites the first token too, which is not scored.
        read = window.clone()
        if tokenizer.bos_token_id is not None:
            read[0] = tokenizer.bos_token_id
        logits = model(read[None], use_cache=False).logits[0]
        # The first half is context alone, so that no token is scored with hardly any before it.
        first = context // 2
        nll = F.cross_entropy(logits[first:-1].double(), window[first + 1 :], reduction="sum")
        total += float(nll)
        count += context - first - 1
    if count == 0:
        raise ConfigError(f"--text: expected at least {context} tokens, found {len(ids)}")
    return perplexity(total / count)


def llama_perplexity(program: Path, model: Path, text: Path, context: int) -> float:
    """The perplexity that llama.cpp finds.

    Raises:
        ConversionError: it finds none.
    """
    output = run([str(program), "-m", str(model), "-c", str(context), "-f", str(text)])
    found = _ESTIMATE.search(output)
    if found is None:
        last = output.strip().splitlines()[-1:] or ["no output"]
        raise ConversionError(f"{program}: printed no perplexity of {model.name}: {last[0]}")
    return float(found[1])


def run(command: list[str]) -> str:
    """What a command prints.

    Raises:
        ConversionError: it fails.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    if done.returncode:
        last = output.strip().splitlines()[-1:] or ["no output"]
        # The script, where Python runs one.
        program = next(part for part in command if part != sys.executable)
        raise ConversionError(f"{program}: exit code {done.returncode}: {last[0]}")
    return output


if __name__ == "__main__":
    command_line.run(main)
