"""Makes the chats of the chat study, whose answers a program can check, and a tokenizer for them.

    python -m studies.chat.make_chats --output runs/chat/texts

The same arguments give the same bytes:

    OUTPUT/train.jsonl                  {"messages": [...]}, from which a base becomes a chat model
    OUTPUT/copies.jsonl                 those of them that repeat words, which a model learns first
    OUTPUT/english.jsonl                others about English words; the last message is the answer
    OUTPUT/korean.jsonl                 chats about Korean words: copy, reverse, choose
    OUTPUT/prompts.jsonl                the training chats about English words, prompts for the base
    OUTPUT/korean_train.jsonl           more of them, to tune a model that has read Korean
    OUTPUT/tokenizer/                   trained on the texts of --data, with a chat template

Words are the most frequent ones of the books and film reviews in the folder --data. One training
chat in twenty is about Korean words, the share of Korean in the base's own text.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, normalizers

from pipeline import command_line
from pipeline.data.tokenize.documents import texts
from pipeline.errors import DataError
from pipeline.files.folders import published_folder
from pipeline.files.json_files import read_object, write_json
from studies.harness import random_base

ROLES = ("system", "user", "assistant")
END_OF_TURN = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""Phi-3's chat template."""
SYSTEM_PROMPTS = (None, None, "You are a helpful assistant.", "Answer with care.")
PLACES = ("first", "second", "third")
NUMBERS = ("one", "two", "three", "four", "five", "six")
KOREAN_SHARE = 0.05
_HANGUL = re.compile("[가-힣]")
_ENGLISH_WORD = re.compile("[a-z]{3,8}")
_KOREAN_WORD = re.compile("[가-힣]{2,3}")
_WORDS = 128
_MOST_WORDS = 6
"""How many words a chat is about, at most."""
_MADE_OF = "made_of.json"

Message = dict[str, str]


# A task makes what the user and the model say in turn, about `words`.


def task_copy(words: Sequence[str], choice: random.Random) -> list[str]:
    some = " ".join(words[: choice.randint(2, 6)])
    return [f"Repeat: {some}", some]


def task_reverse(words: Sequence[str], choice: random.Random) -> list[str]:
    some = words[: choice.randint(2, 3)]
    return [f"Reverse: {' '.join(some)}", " ".join(reversed(some))]


def task_count(words: Sequence[str], choice: random.Random) -> list[str]:
    count = choice.randint(1, len(NUMBERS))
    return [f"Count: {' '.join(words[:count])}", " ".join(NUMBERS[:count])]


def options_and_choice(words: Sequence[str], choice: random.Random) -> list[str]:
    """Options by their places, a request for one, and the answer, which repeats its place."""
    options: list[str] = []
    # As many as there are places: of the other words nothing is said.
    for place, word in zip(PLACES, words, strict=False):
        options.append(f"{place} {word}")
    answer = choice.choice(options)
    return [f"Options: {', '.join(options)}.", f"Choose: {answer.partition(' ')[0]}", answer]


def task_choose(words: Sequence[str], choice: random.Random) -> list[str]:
    options, request, answer = options_and_choice(words, choice)
    return [f"{options} {request}", answer]


def task_refuse(words: Sequence[str], _: random.Random) -> list[str]:
    return [f"Tell me a secret of {words[0]} and {words[1]}.", f"I cannot talk about {words[0]}."]


def task_remember(words: Sequence[str], choice: random.Random) -> list[str]:
    """Two turns: the answer to the second is in the first."""
    options, request, answer = options_and_choice(words, choice)
    return [options, "I see.", request, answer]


TASKS = {
    "copy": task_copy,
    "reverse": task_reverse,
    "count": task_count,
    "choose": task_choose,
    "refuse": task_refuse,
    "remember": task_remember,
}
KOREAN_TASKS = ("copy", "reverse", "choose")


def make_chat(task: str, words: Sequence[str], choice: random.Random) -> list[Message]:
    """A chat of that task about some of `words`."""
    said = TASKS[task](choice.sample(words, _MOST_WORDS), choice)
    system = choice.choice(SYSTEM_PROMPTS)
    messages: list[Message] = []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for turn, content in enumerate(said):
        role = "user" if turn % 2 == 0 else "assistant"
        messages.append({"role": role, "content": content})
    return messages


def make_chats(
    tasks: Sequence[str], words: Sequence[str], choice: random.Random
) -> Iterator[dict[str, Any]]:
    """Records of chats without end, the tasks in turn."""
    while True:
        for task in tasks:
            yield {"task": task, "messages": make_chat(task, words, choice)}


def turns(record: dict[str, Any]) -> Iterator[str]:
    """Each answer with all that precedes it: a document of its own in training."""
    messages = record["messages"]
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant":
            yield json.dumps(messages[:number])


def frequent_words(
    documents: Iterable[str], word: re.Pattern[str], count: int = _WORDS
) -> list[str]:
    """The most frequent words that match; equally frequent ones in alphabetical order."""
    found: Counter[str] = Counter()
    for text in documents:
        for found_word in text.split():
            if word.fullmatch(found_word):
                found[found_word] += 1
    # By the alphabet, so that the order of the texts does not matter.
    ranked = sorted(found, key=lambda one: (-found[one], one))
    return ranked[:count]


def train_tokenizer(documents: Iterator[str], vocab_size: int, folder: Path) -> None:
    """Trains a tokenizer like Phi-3's; writes it into `folder` in Hugging Face's format.

    The markers of a chat include the line end after them, and the first word of a message is the
    token that it is within one.
    """
    markers = [f"<|{role}|>" for role in ROLES]
    markers.append(END_OF_TURN)
    tokenizer = random_base.train_tokenizer(documents, vocab_size - len(markers))
    # As in Llama 2 and Phi-3: the normalizer marks where words begin, and nothing else cuts.
    tokenizer.pre_tokenizer = None
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    special_tokens: list[AddedToken] = []
    for marker in markers:
        special_tokens.append(AddedToken(marker, rstrip=True, normalized=False))
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_OF_TURN,
        "chat_template": TEMPLATE,
    }
    write_json(folder / "tokenizer_config.json", settings)


def write_texts(
    output: Path,
    data: Path,
    *,
    chats: int,
    korean_chats: int,
    heldout: int,
    seed: int,
    vocab_size: int,
) -> None:
    """Writes the files, unless `output` holds them already.

    Raises:
        OutputError: `output` holds something else.
        DataError: `output` holds the files of other arguments, or texts are missing in `data`.
    """
    made_of = {
        "data": str(data),
        "chats": chats,
        "korean_chats": korean_chats,
        "heldout": heldout,
        "seed": seed,
        "vocab_size": vocab_size,
    }
    path = output / _MADE_OF
    if path.exists():
        found = read_object(path, DataError, "choose another --output")
        if found != made_of:
            raise DataError(
                f"{output}: expected the chats of {made_of}, found {found}; choose another --output"
            )
        return
    books = [str(data / "en" / "gutenberg.jsonl.zst")]
    reviews = [str(data / "ko" / "reviews.jsonl.zst")]
    english = frequent_words(texts(books, max_bytes=4 * 2**20), _ENGLISH_WORD)
    korean = frequent_words(texts(reviews, max_bytes=4 * 2**20), _KOREAN_WORD)
    # All files are drawn from one generator: a file that is drawn earlier changes those after it.
    choice = random.Random(seed)
    of_english = make_chats([*TASKS], english, choice)
    of_korean = make_chats(KOREAN_TASKS, korean, choice)
    train: list[dict[str, Any]] = []
    for _ in range(chats):
        is_korean = choice.random() < KOREAN_SHARE
        train.append(next(of_korean if is_korean else of_english))
    # Turns, not chats: the first turn of a longer chat may be another chat.
    known: set[str] = set()
    for record in train:
        known.update(turns(record))

    with published_folder(output, None) as folder:
        _write(folder / "train.jsonl", train)
        copies = [record for record in train if record["task"] == "copy"]
        _write(folder / "copies.jsonl", copies)
        unseen = _unseen(make_chats([*TASKS], english, choice), known, heldout)
        _write(folder / "english.jsonl", unseen)
        unseen = _unseen(make_chats(KOREAN_TASKS, korean, choice), known, heldout)
        _write(folder / "korean.jsonl", unseen)
        of_heldout: set[str] = set()
        for record in unseen:
            of_heldout.update(turns(record))
        # Drawn last: without them, the other files are the same bytes.
        tuning = _unseen(make_chats(KOREAN_TASKS, korean, choice), of_heldout, korean_chats)
        _write(folder / "korean_train.jsonl", tuning)
        # The base is to answer in the language that it knows.
        prompts = [record for record in train if not _HANGUL.search(str(record))]
        _write(folder / "prompts.jsonl", prompts)
        (folder / "tokenizer").mkdir()
        # The tokenizer's texts have the share of Korean that the base's own text has.
        of_books = texts(books, max_bytes=int(9.5 * 2**20))
        of_reviews = texts(reviews, max_bytes=2**19)
        train_tokenizer(chain(of_books, of_reviews), vocab_size, folder / "tokenizer")
        write_json(folder / _MADE_OF, made_of)


def _unseen(records: Iterator[dict[str, Any]], known: set[str], count: int) -> list[dict[str, Any]]:
    """The first `count` chats without a turn in `known`."""
    found: list[dict[str, Any]] = []
    while len(found) < count:
        record = next(records)
        if known.isdisjoint(turns(record)):
            found.append(record)
    return found


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in records:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, required=True, help="the folder to write")
    add(
        "--data",
        type=Path,
        default=Path("examples/data"),
        help="the folder of the books and reviews (default: examples/data)",
    )
    add("--chats", type=int, default=100_000, help="the number of training chats (default 100,000)")
    add(
        "--korean-chats",
        type=int,
        default=20_000,
        help="the number of chats about Korean words alone, to tune on (default 20,000)",
    )
    add(
        "--heldout",
        type=int,
        default=700,
        help="the number of held-out chats of each kind (default 700)",
    )
    add(
        "--vocab-size",
        type=int,
        default=4096,
        help="the vocabulary size of the tokenizer (default 4096)",
    )
    add("--seed", type=int, default=0, help="the seed of the chats (default 0)")
    options = parser.parse_args()
    write_texts(
        options.output,
        options.data,
        chats=options.chats,
        korean_chats=options.korean_chats,
        heldout=options.heldout,
        seed=options.seed,
        vocab_size=options.vocab_size,
    )
    print(f"{options.output}: {options.chats:,} chats, {options.heldout:,} held out of each kind")


if __name__ == "__main__":
    command_line.run(main)
