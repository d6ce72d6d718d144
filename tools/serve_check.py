r"""Shows what each format that servers use costs an export, beside what it costs the export's base.

    scale-cpt serve-check configs/serve_check.yaml
    scale-cpt serve-check --export exported --base path/to/base --json serve_check.json
    make serve-check CONFIG=my_run.yaml

Both models are measured in fp32 and in every format of --formats: the perplexity of held-out text, and how many tokens
of a greedy continuation are those of fp32 before the first that is not. transformers computes with weights that are
rounded as the format stores them. Rows of llama.cpp come from its own converter and engine, where they are installed.

A row fails if the export's perplexity grows by over 1 % more than the base's, or if in fp32 its greedy continuation is
another. Then the exit code is not 0. Both models are held in memory in fp32, one after the other.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast, get_args

import torch
from torch import Tensor

from pipeline import command_line, log
from pipeline.config.run import load_config
from pipeline.conversion import ServedPrecision, llama_cpp
from pipeline.conversion.convert import HF_FOLDER, RECORD, MakeProbe, run_probe
from pipeline.conversion.hf_folder import load_exported
from pipeline.conversion.precisions import Loss, Score, nll_of, scored_in
from pipeline.conversion.verify import Probe, probe_maker
from pipeline.errors import ConfigError, ConversionError
from pipeline.files import read_object, write_json
from pipeline.log import progress_bar
from pipeline.model.output import perplexity

_logger = log.get_logger(__name__)
_PROMPT, _NEW_TOKENS = 32, 16
_LLAMA = "llama.cpp:"
PLAIN: ServedPrecision = "fp32"
FORMATS = (*get_args(ServedPrecision), *(_LLAMA + name for name in llama_cpp.FORMATS))
_EXACT = (PLAIN, _LLAMA + "f32")
"""Formats that round nothing: the greedy text stays the same."""


@dataclass(frozen=True)
class Figures:
    """One model in one format: the nll a token of each text, and of each greedy continuation the tokens that agree."""

    nll: Mapping[str, float]
    greedy: Mapping[str, int]


@dataclass(frozen=True)
class _Reader:
    """A folder, as `probe_maker` asks for its tokenizer and sizes."""

    tokenizer: Path
    spec: Any


class Served:
    """A folder of an export or of a base, its text, and what fp32 continues it with."""

    def __init__(self, folder: Path, base: Path, make_probe: MakeProbe) -> None:
        self.folder = folder
        self.model = load_exported(folder, base, torch.float32)
        tokenizer = folder if (folder / "tokenizer.json").exists() else base
        self.probe: Probe = make_probe(_Reader(tokenizer, self.model.config.get_text_config()))
        self.continued = {name: self._continued(windows[0]) for name, windows in self.probe.items()}

    def _continued(self, window: Tensor) -> Tensor:
        prompt = window[: min(_PROMPT, len(window) // 2)].unsqueeze(0)
        whole: Tensor = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
        )
        return whole[0]

    @torch.no_grad()
    def _figures(self, score: Score) -> Figures:
        """Greedy decoding chooses the same tokens until the likeliest token after the same text is another."""
        greedy = {}
        for name, text in self.continued.items():
            likeliest = score(text)[-_NEW_TOKENS - 1 : -1].argmax(-1)
            greedy[name] = int((likeliest == text[-_NEW_TOKENS:]).cumprod(0).sum())
        return Figures(nll_of(score, self.probe), greedy)

    def figures_in(self, format: str, gguf: Path) -> Figures | str:
        """The figures in a format, or why there are none; llama.cpp's file is made at `gguf`, and removed."""
        context: AbstractContextManager[Score]
        try:
            if format.startswith(_LLAMA):
                windows = [*chain(*self.probe.values()), *self.continued.values()]
                llama_cpp.write_gguf(self.folder, gguf, format.removeprefix(_LLAMA))
                context = llama_cpp.engine(gguf, max(map(len, windows)))
            else:
                context = scored_in(self.model, cast(ServedPrecision, format))
            with context as score:
                return self._figures(score)
        except ConversionError as error:
            return str(error)
        finally:
            gguf.unlink(missing_ok=True)


@dataclass(frozen=True)
class Row:
    """A format, and both models in it or why there are no figures; `plain` are theirs in fp32."""

    format: str
    base: Figures | str
    export: Figures | str
    plain: tuple[Figures, Figures]

    @cached_property
    def loss(self) -> Loss | None:
        """What the format costs, if both could be measured."""
        if isinstance(self.base, str) or isinstance(self.export, str):
            return None
        plain_base, plain_export = self.plain
        return Loss.of(self.export.nll, self.base.nll, plain_export.nll, plain_base.nll)

    @property
    def fault(self) -> str | None:
        """Why the row fails. What not even the base can be is no fault of the export."""
        if isinstance(self.base, str):
            return None
        if isinstance(self.export, str):
            return self.export
        if self.loss and not self.loss.is_acceptable:
            return f"perplexity grows by {self.loss.export_factor:.4g}, the base's by {self.loss.base_factor:.4g}"
        if self.format in _EXACT and min(self.export.greedy.values()) < _NEW_TOKENS <= min(self.base.greedy.values()):
            return "the greedy continuation is another, the base's is not"
        return None

    def as_json(self) -> dict[str, Any]:
        """Perplexities and greedy tokens by text, and by which factors the perplexities grow."""
        values: dict[str, Any] = {"format": self.format, "fault": self.fault}
        for who, found in (("base", self.base), ("export", self.export)):
            values[who] = found
            if isinstance(found, Figures):
                perplexities = {text: perplexity(nll) for text, nll in found.nll.items()}
                values[who] = {"perplexity": perplexities, "greedy_tokens_kept": found.greedy}
        if self.loss:
            values |= {"export_factor": self.loss.export_factor, "base_factor": self.loss.base_factor}
        return values


def table(rows: Sequence[Row]) -> str:
    """Perplexities and greedy tokens of base and export on each text."""
    columns = [(who, text) for who, its in zip(("base", "export"), rows[0].plain, strict=True) for text in its.nll]
    names = [f"{who}, {text}" for who, text in columns]
    widths = [max(18, len(name)) for name in names]
    lines = ["".join([f"{'format':<18}", *(f"  {name:>{width}}" for name, width in zip(names, widths, strict=True))])]
    for row in rows:
        cells = []
        for (who, text), width in zip(columns, widths, strict=True):
            found = row.base if who == "base" else row.export
            shown = "-"
            if isinstance(found, Figures):
                shown = f"{perplexity(found.nll[text]):.4g}  {found.greedy[text]:>2}/{_NEW_TOKENS}"
            cells.append(f"  {shown:>{width}}")
        verdict = row.fault or ("ok" if row.loss else str(row.base))
        lines.append(f"{row.format:<18}" + "".join(cells) + f"  {verdict}")
    return "\n".join(lines)


def check(export: Path, base: Path, make_probe: MakeProbe, formats: Sequence[str]) -> list[Row]:
    """A row for each of `formats`."""
    found: list[dict[str, Figures | str]] = []
    with tempfile.TemporaryDirectory() as scratch, progress_bar("measuring", 2 * len(formats) + 2, "formats") as bar:
        for folder in (base, export):
            served, figures = Served(folder, base, make_probe), {}
            for name in dict.fromkeys((PLAIN, *formats)):
                figures[name] = served.figures_in(name, Path(scratch) / "model.gguf")
                bar.update(1)
            found.append(figures)
            del served  # before the next model is loaded
    plain = (cast(Figures, found[0][PLAIN]), cast(Figures, found[1][PLAIN]))
    return [Row(name, found[0][name], found[1][name], plain) for name in formats]


def add_options(parser: argparse.ArgumentParser) -> None:
    command_line.add_run(parser, required=False)
    parser.add_argument("--export", type=Path, help="a folder that tools/convert_checkpoint.py wrote")
    parser.add_argument("--base", type=Path, help="the base's folder (default: the one that it was converted with)")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="documents to measure on (JSONL, .txt …)")
    shown = f"default: all of {', '.join(FORMATS)}"
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS, metavar="F", help=shown)
    parser.add_argument("--json", type=Path, help="where to write the rows")


def main(arguments: argparse.Namespace) -> int:
    if (arguments.run is None) == (arguments.export is None):
        raise ConfigError("name a run, or --export: one of them")
    make_probe: MakeProbe = probe_maker({})
    if arguments.run:
        config = load_config(arguments.run, arguments.set)
        export, make_probe = config.folder / HF_FOLDER, run_probe(config)
    else:
        export = arguments.export
    try:
        record = read_object(export / RECORD, ConversionError)
    except FileNotFoundError:
        missing = f"{export / RECORD}: no such file; convert the run's checkpoint first, or name a converted folder"
        raise ConversionError(missing) from None
    if arguments.text:
        make_probe = probe_maker({path.name: [str(path)] for path in arguments.text})
    formats = list(arguments.formats)
    why_not = llama_cpp.why_missing() if record.get("written_format") == "stock" else "it runs stock exports alone"
    if why_not and any(name.startswith(_LLAMA) for name in formats):
        print(f"llama.cpp is not checked: {why_not}")
        formats = [name for name in formats if not name.startswith(_LLAMA)]
    rows = check(export, arguments.base or Path(str(record["base"])), make_probe, formats) if formats else []
    if rows:
        print(table(rows))
    faults = [row.format for row in rows if row.fault]
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        write_json(arguments.json, {"export": str(export), "rows": [row.as_json() for row in rows]})
    print(f"{export}: " + (f"do not serve it in {', '.join(faults)}" if faults else "every row holds"))
    return 1 if faults else 0


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
