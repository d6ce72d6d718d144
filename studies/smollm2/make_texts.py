"""Makes the texts of the study on SmolLM2: parts of examples/data, and what a base must not lose.

    python -m studies.smollm2.make_texts --output runs/smollm2/texts

The same arguments and the same Python give the same bytes:

    OUTPUT/reviews.jsonl, law.jsonl     Korean to learn, the first --mib MiB of each
    OUTPUT/hangul.jsonl                 both without Chinese characters, for new tokens: those of a
                                        token with such a character would change Chinese, too
    OUTPUT/books.jsonl                  English books, which a gate learns from
    OUTPUT/*.heldout.jsonl              held out of each of these
    OUTPUT/code.heldout.jsonl           modules of Python's standard library, which the base has read
    OUTPUT/languages.heldout.jsonl      sentences in eight languages
    OUTPUT/questions.jsonl              150 English questions, for the base to answer
    OUTPUT/asked.jsonl                  50 others, to compare answers with
"""

from __future__ import annotations

import argparse
import json
import re
import sysconfig
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path

from pipeline import command_line
from pipeline.data.tokenize.documents import texts
from pipeline.files.publishing import write_text

SOURCES = {"reviews": "ko/reviews", "law": "ko/law", "books": "en/gutenberg"}
_MODULES = (
    "argparse",
    "calendar",
    "csv",
    "fractions",
    "heapq",
    "json/decoder",
    "shlex",
    "textwrap",
)
_CHARACTERS_OF_MODULE = 4000
_HELDOUT_MIB = 0.25
_CHINESE_CHARACTERS = re.compile("[\u3400-\u9fff\uf900-\ufaff]")
LANGUAGES = {
    "de": "Die alte Brücke über den Fluss wird im Frühjahr erneuert. Bis dahin fahren die Busse "
    "einen Umweg durch das Tal. Viele Pendler sind darüber verärgert, aber der Bürgermeister "
    "verspricht, dass die Arbeiten vor dem Sommer abgeschlossen sind.",
    "fr": "Le marché ouvre tous les samedis à sept heures du matin. Les agriculteurs de la région y "
    "vendent des légumes, du fromage et du miel. Ma grand-mère dit que les tomates y sont "
    "meilleures qu'ailleurs, et elle a raison.",
    "es": "Ayer por la tarde fuimos al museo de historia natural con los niños. Les gustaron mucho "
    "los esqueletos de los dinosaurios y la sala de los minerales. Después comimos un helado en "
    "la plaza y volvimos a casa en autobús.",
    "it": "Il treno per Bologna parte dal binario quattro tra dieci minuti. Se lo perdiamo, dobbiamo "
    "aspettare quasi due ore. Prendi i biglietti e le valigie, io compro due panini e una "
    "bottiglia d'acqua per il viaggio.",
    "pt": "O meu irmão trabalha numa pequena livraria no centro da cidade. Aos domingos ele lê "
    "histórias para as crianças do bairro. No ano passado publicou o seu primeiro livro, que "
    "fala de um pescador e da sua filha.",
    "ru": "Вчера вечером в нашем городе выпал первый снег. Дети сразу выбежали во двор и слепили "
    "большого снеговика. Утром он уже растаял, но по прогнозу на следующей неделе снова будет "
    "холодно.",
    "ja": "先週の日曜日、友達と山に登りました。頂上からは海と町がよく見えて、とてもきれいでした。"
    "お弁当を食べてから、ゆっくり歩いて下りました。来月もまた行きたいと思います。",
    "zh": "我家附近新开了一家书店，里面有很多关于历史和科学的书。周末的时候，我常常去那里看书，"
    "一坐就是一个下午。店主很热情，还会给客人泡一杯热茶。",
}
_COUNTRIES = [
    "France",
    "Japan",
    "Brazil",
    "Egypt",
    "Canada",
    "Italy",
    "Spain",
    "Kenya",
    "India",
    "China",
    "Greece",
    "Norway",
    "Mexico",
    "Peru",
    "Poland",
    "Turkey",
    "Cuba",
    "Chile",
    "Ireland",
    "Portugal",
]
_COUNTRY_QUESTIONS = (
    "What is the capital of {}?",
    "Name a food that people eat in {}.",
    "On which continent is {}?",
)
_THINGS = [
    "photosynthesis",
    "gravity",
    "rain",
    "democracy",
    "music",
    "bread",
    "friendship",
    "mathematics",
    "bicycles",
    "volcanoes",
    "sleep",
    "honesty",
    "computers",
    "winter",
    "trees",
    "money",
    "history",
    "teachers",
    "rivers",
    "electricity",
]
_THING_REQUESTS = (
    "Explain {} to a child in two sentences.",
    "Write a short poem about {}.",
    "Why is {} important?",
    "Give me three facts about {}.",
)
_TASKS = (
    "adds two numbers",
    "reverses a string",
    "counts the vowels in a text",
    "sorts a list of names",
    "reads a file line by line",
    "finds the largest number in a list",
    "checks whether a word is a palindrome",
    "computes a factorial",
    "removes duplicates from a list",
    "converts Celsius to Fahrenheit",
)
_TASK_REQUESTS = ("Write a Python function that {}.", "How do I write JavaScript that {}?")


def questions() -> Iterator[str]:
    """200 English questions, the first of every kind first."""
    kinds = [
        *product(_COUNTRY_QUESTIONS, _COUNTRIES),
        *product(_THING_REQUESTS, _THINGS),
        *product(_TASK_REQUESTS, _TASKS),
    ]
    asked = [template.format(word) for template, word in kinds]
    asked += [f"What is {a} times {b}?" for a, b in product(range(2, 12), (3, 4, 6, 7))]
    # In steps through the kinds, so that the first questions are of all of them.
    step = 10
    for first in range(step):
        yield from asked[first::step]


def write_texts(output: Path, data: Path, mib: float) -> None:
    """Writes all texts into the folder `output`, from those in `data`.

    Raises:
        DataError: a text is missing in `data`, or damaged.
    """
    output.mkdir(parents=True, exist_ok=True)
    for name, source in SOURCES.items():
        _write(output / f"{name}.jsonl", _first(data / f"{source}.jsonl.zst", mib))
        heldout = _first(data / f"{source}.heldout.jsonl.zst", _HELDOUT_MIB)
        _write(output / f"{name}.heldout.jsonl", heldout)
    korean = [*_first(data / f"{SOURCES['reviews']}.jsonl.zst", mib)]
    korean += _first(data / f"{SOURCES['law']}.jsonl.zst", mib)
    _write(output / "hangul.jsonl", [_CHINESE_CHARACTERS.sub("", text) for text in korean])
    _write(output / "code.heldout.jsonl", _modules())
    _write(output / "languages.heldout.jsonl", LANGUAGES.values())
    asked = list(questions())
    _write(output / "asked.jsonl", asked[::4])
    _write(output / "questions.jsonl", [text for place, text in enumerate(asked) if place % 4])


def _first(file: Path, mib: float) -> Iterator[str]:
    """The first documents of a file, as many as have `mib` MiB."""
    left = mib * 2**20
    for text in texts([str(file)]):
        if left <= 0:
            return
        left -= len(text.encode())
        yield text


def _modules() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        text = (library / f"{module}.py").read_text(encoding="utf-8")
        yield text[:_CHARACTERS_OF_MODULE]


def _write(path: Path, documents: Iterable[str]) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in documents]
    write_text(path, "".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("runs/smollm2/texts"), help="the folder to write")
    add("--data", type=Path, default=Path("examples/data"), help="the folder of the texts")
    add("--mib", type=float, default=3.0, help="MiB of each text to learn from (default: 3)")
    options = parser.parse_args()
    write_texts(options.output, options.data, options.mib)
    print(options.output)


if __name__ == "__main__":
    command_line.run(main)
