"""Prints every setting of a run, with type, default and meaning, as docs/configuration.md.

    scale-cpt describe-config > docs/configuration.md

A test compares that page with this output.
"""

from __future__ import annotations

import argparse
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipeline import command_line
from pipeline.config.reading import is_section
from pipeline.config.run import RunConfig

_INTRODUCTION = """# Configuration

One YAML file describes a run. Unknown keys are refused, and all faults are reported at once with their dotted paths.
Relative paths count from the working directory, which is the project's root in the scripts of `slurm/`.
The complete file below is a small example, `configs/cpt_korean_llama3.2_1b.yaml` a real one, and
`configs/cpt_korean_llama3.1_8b.yaml` the same for a larger base.

    scale-cpt config init --base models/mine --new 'texts/*.jsonl' --old general.jsonl --output my_run.yaml
    scale-cpt config show my_run.yaml --set schedule.steps=20

`init` writes a commented file with sizes that fit the base, the texts and the machine (`--gpus 8` for another one),
and shows its dry run. `show` prints every setting with its source: the file, a file that it extends, `--set`, or the
default.

**One file extends another** with `extends: other.yaml`, relative to itself, over any number of levels; a study may
extend a study. Sections are merged key by key. A list is replaced as a whole. `null` removes a section, such as
`gate: null`; a section with another `name`, such as another method, replaces the one before.

**`--set KEY=VALUE`** changes a setting for every command that reads a run, and may be repeated:
`--set schedule.steps=20 --set data.corpora.korean.weight=2`. Values are YAML, of the type in the tables below.
A run's first stage writes all of it, with what the file extends and with `--set`, to `run.yaml` in the run's folder.
**Every command takes that folder in place of the file**: `scale-cpt evaluate runs/demo`. What the command line says is
what runs. A run that has begun refuses settings that would make it another run, such as another method; other changes,
such as more steps, are in `run.yaml` from the next training on. `attempts.jsonl` records what differs from `run.yaml`
as it was when training started: give changes by `--set` or in your own file, since edits of `run.yaml` leave no trace.

This page is printed by `scale-cpt describe-config`.

## A complete file

{example}: `make demo` runs it.

```yaml
{yaml}```

## DeepSpeed's file

The key `deepspeed` names one of these. They hold ZeRO and precision only; the batch, the optimizer and the
clipping come from the run's file.

| file | precision | what it is for |
|---|---|---|
{deepspeed}
[sizing.md](sizing.md#how-to-choose) says how to choose.
"""
_EXAMPLE = "configs/demo.yaml"
_DEEPSPEED = {
    "zero1.json": (
        "bf16",
        "a base that fits on each GPU: the default choice, since frozen weights need no optimizer state",
    ),
    "zero2.json": ("bf16", "the same where memory is short: gradients are sharded too"),
    "zero3.json": ("bf16", "a base that does not fit: its weights are sharded, and gathered in each micro-batch"),
    "zero3_offload.json": ("bf16", "the last resort: weights and optimizer states in host memory"),
    "zero1_fp32.json": ("fp32", "CPUs, and small models whose runs are to be compared to the last digits"),
    "zero3_fp32.json": ("fp32", "ZeRO-3 on CPUs, as in the demo"),
}
_WORDS = {int: "integer", float: "number", str: "text", bool: "true or false", Path: "path", type(None): "nothing"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """None."""


def main(arguments: argparse.Namespace) -> None:
    print(as_markdown(), end="")


def as_markdown() -> str:
    """The whole page."""
    root = Path(__file__).resolve().parent.parent
    rows = [(path.name, *_DEEPSPEED[path.name]) for path in sorted((root / "ds_configs").glob("*.json"))]
    introduction = _INTRODUCTION.format(
        example=f"`{_EXAMPLE}`",
        yaml=(root / _EXAMPLE).read_text(encoding="utf-8"),
        deepspeed="".join(f"| `ds_configs/{name}` | {precision} | {purpose} |\n" for name, precision, purpose in rows),
    )
    return introduction + "".join(_section("", RunConfig))


def _section(path: str, section: type[BaseModel]) -> Iterator[str]:
    title = f"`{path}`" if path else "Top level"
    summary = re.sub(r"\s+", " ", (section.__doc__ or "").split("\n\n")[0].strip())
    yield f"\n## {title}\n\n{summary}\n\n| key | type | default | meaning |\n|---|---|---|---|\n"
    for name, field in section.model_fields.items():
        yield f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {field.description or ''} |\n"
    for name, field in section.model_fields.items():
        for inner in _sections(field.annotation):
            child = f"{path}.{name}" if path else name
            if get_origin(field.annotation) is dict:
                child += ".<name>"
            kind = inner.model_fields.get("name")
            if path == "" and name == "method" and kind is not None:
                child += f" (name: {get_args(kind.annotation)[0]})"
            yield from _section(child, inner)


def _sections(annotation: Any) -> list[type[BaseModel]]:  # noqa: ANN401
    if is_section(annotation):
        return [annotation]
    return [inner for part in get_args(annotation) for inner in _sections(part)]


def _type(annotation: Any) -> str:  # noqa: ANN401
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in parts)
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in parts))
    if origin in (list, tuple):
        return f"list of {_type(parts[0])}"
    if is_section(annotation):
        return "section"
    return "one section a name" if origin is dict else _WORDS.get(annotation, str(annotation))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.default
    if default is None or isinstance(default, BaseModel):
        return ""
    return f"`{list(default) if isinstance(default, tuple) else default}`".replace("True", "true").replace(
        "False", "false"
    )


if __name__ == "__main__":
    command_line.run_program(add_options, main, __doc__)
