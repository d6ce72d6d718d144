"""Prints how several models continue the same texts: English, French, code, Korean.

    python -m studies.smollm2.continuations --model base=runs/bases/smollm2-135m \\
        gated=runs/smollm2_korean/hf ungated=runs/smollm2_korean/ungated

Continuations are greedy. The table is Markdown.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from pipeline import command_line
from pipeline.command_line import positive
from studies.smollm2.chats import load_writer

PROMPTS = {
    "English": "The old lighthouse keeper climbed the stairs and",
    "French": "La capitale de la France est",
    "code": "def is_prime(n):\n",
    "Korean, a review": "이 영화는 정말",
    "Korean, a statute": "제1조(목적) 이 법은",
}


def continuations_of(folder: Path, max_tokens: int) -> list[str]:
    """What the model in `folder` writes after each of `PROMPTS`.

    Raises:
        BaseModelError: the folder holds no model.
    """
    writer = load_writer(folder)
    tokenizer = writer.tokenizer
    written: list[str] = []
    for prompt in PROMPTS.values():
        # As documents begin in training.
        ids = [*tokenizer.before_document, *tokenizer.reference.encode([prompt]).ids.tolist()]
        written.append(tokenizer.decode(writer.continued(ids, max_tokens)))
    return written


def continuations_table(models: dict[str, Path], max_tokens: int) -> str:
    """A row for each of `PROMPTS`, a column for each model."""
    columns = [continuations_of(folder, max_tokens) for folder in models.values()]
    lines = [f"| text | {' | '.join(models)} |", "|---" * (len(models) + 1) + "|"]
    for row, (name, prompt) in enumerate(PROMPTS.items()):
        cells = [f"{name}: `{_on_one_line(prompt)}`"]
        cells += [f"`{_on_one_line(column[row])}`" for column in columns]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _on_one_line(text: str) -> str:
    return text.strip("\n").replace("\n", "⏎").replace("|", "¦").replace("`", "'")


def _named_folder(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not folder:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=FOLDER")
    return name, Path(folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", nargs="+", type=_named_folder, required=True, help="NAME=FOLDER, a column each")
    add("--max-tokens", type=positive, default=24, help="of a continuation (default: 24)")
    options = parser.parse_args()
    names = [name for name, _ in options.model]
    if len(set(names)) < len(names):
        parser.error("--model: expected names that differ, a column each")
    print(continuations_table(dict(options.model), options.max_tokens))


if __name__ == "__main__":
    command_line.run(main)
