"""Asks a base and models that were made of it the same questions, and compares the answers.

    python -m studies.smollm2.chats --base runs/bases/smollm2-135m --questions asked.jsonl \\
        --model runs/smollm2_korean/hf --output runs/smollm2_korean/chats.json

Answers are greedy. A model that stays what it was gives the base's answer to the last character;
what it has learned shows in its answers to Korean.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline import command_line
from pipeline.command_line import folder_or_hub, positive
from pipeline.data.tokenizer.chats import chat_template
from pipeline.data.tokenizer.load import Tokenizer, load_tokenizer
from pipeline.errors import DataError
from pipeline.files.json_files import write_json
from pipeline.hf.load import load_hf_model, pop_eos_token_ids
from pipeline.log import progress_bar

KOREAN = ("이 영화 정말 재미있어요. 당신은 어떻게 생각하세요?", "대한민국의 수도는 어디인가요?")
"""Questions in Korean, after which a gate is open."""


@dataclass(frozen=True)
class Answers:
    """A model's answers.

    Attributes:
        english: to the questions, in their order.
        korean: to those of `KOREAN`.
        ended: how many of all ended before the limit of tokens.
    """

    english: list[str]
    korean: list[str]
    ended: int

    def same_as(self, base: Answers) -> int:
        """How many English answers are the base's to the last character."""
        return sum(mine == its for mine, its in zip(self.english, base.english, strict=True))


@dataclass(frozen=True)
class Writer:
    """A model that continues texts greedily.

    Attributes:
        model: from `load_hf_model`.
        tokenizer: the model's own.
        ends: the tokens after which it stops.
    """

    model: Any
    tokenizer: Tokenizer
    ends: list[int]

    @torch.no_grad()
    def continued(self, ids: list[int], max_tokens: int) -> list[int]:
        """The tokens that follow `ids`, up to and with the first of `ends`."""
        prompt = torch.tensor([ids], device=self.model.device)
        found = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=self.ends,
            pad_token_id=self.ends[0],
        )
        following: list[int] = found[0, len(ids) :].tolist()
        return following


def load_writer(folder: Path) -> Writer:
    """The model in `folder`.

    Raises:
        BaseModelError: the folder holds no model.
    """
    model = load_hf_model(folder)
    tokenizer = load_tokenizer(folder)
    ends = pop_eos_token_ids(model) or list(tokenizer.document_end[-1:])
    return Writer(model, tokenizer, ends)


def answers_of(folder: Path, questions: Sequence[str], max_tokens: int) -> Answers:
    """The greedy answers of the model in `folder`.

    Raises:
        BaseModelError: the folder holds no model.
    """
    writer = load_writer(folder)
    tokenizer = writer.tokenizer
    template = chat_template(folder)
    written: list[str] = []
    ended = 0
    asked = [*questions, *KOREAN]
    with progress_bar(str(folder), len(asked), " answers") as bar:
        for question in asked:
            text = template.opened([{"role": "user", "content": question}])
            ids = tokenizer.reference.encode([text]).ids.tolist()
            answer = writer.continued(ids, max_tokens)
            if answer and answer[-1] in writer.ends:
                ended += 1
                answer.pop()
            written.append(tokenizer.decode(answer))
            bar.update(1)
    return Answers(written[: len(questions)], written[len(questions) :], ended)


def read_questions(path: Path, limit: int) -> list[str]:
    """The first questions of a file of chats or of texts in JSONL.

    Raises:
        DataError: there is none.
    """
    questions: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines()[:limit]:
        record = json.loads(line)
        if "messages" in record:
            questions.append(record["messages"][0]["content"])
        else:
            questions.append(record["text"])
    if not questions:
        raise DataError(f"{path}: expected questions, one a line, found none")
    return questions


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--base", type=folder_or_hub, required=True, help="the base's folder")
    add("--model", type=Path, required=True, help="the export's folder")
    add("--questions", type=Path, required=True, help="JSONL with `text` or `messages`")
    add("--limit", type=positive, default=20, help="how many are asked (default: 20)")
    add("--max-tokens", type=positive, default=64, help="of an answer (default: 64)")
    add("--output", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args()
    questions = read_questions(options.questions, options.limit)
    base = answers_of(options.base, questions, options.max_tokens)
    model = answers_of(options.model, questions, options.max_tokens)
    same = model.same_as(base)
    record = {
        "questions": questions,
        "korean_questions": KOREAN,
        "same": same,
        "base": asdict(base),
        "model": asdict(model),
    }
    write_json(options.output, record)
    print(f"{options.model}: {same} of {len(questions)} English answers are the base's")
    for question, answer in zip(KOREAN, model.korean, strict=True):
        print(f"  {question}\n    {answer}")


if __name__ == "__main__":
    command_line.run(main)
