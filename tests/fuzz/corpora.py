"""Corpora to tokenize, the state of a killed tokenization, and finished corpora."""

from __future__ import annotations

import contextlib
import gzip
import json
import lzma
import multiprocessing
import random
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import awkward  # noqa: F401  the fast encoder imports it when it is first used: every child would
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pipeline.data.packing import PackedCorpus
from pipeline.data.preprocess import preprocess
from pipeline.data.token_corpus import SAMPLED_BLOCKS, TokenCorpus
from pipeline.data.tokenizer import load_tokenizer
from pipeline.data.unit_work import Job
from pipeline.data.units import input_files
from pipeline.data.workers import Workers, local_workers
from tests.fuzz import odd_tables
from tests.fuzz.damage import damage_any, damage_file
from tests.fuzz.odd_files import make_odd
from tests.fuzz.subject import INPUT, POOL, SilentChangeError, Subject, digest, files_digest
from tests.programs import call
from tools import inspect_data

TOKENIZER = Path("tokenizer")
_TEXTS = [f"Once upon a time there were {number} cats. 고양이 {'and a dog ' * (number % 7)}." for number in range(60)]
_RECORDS = [{"text": text, "prompt": text[:20], "n": number} for number, text in enumerate(_TEXTS)]
_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": partial(gzip.compress, mtime=0),
    ".zst": zstandard.compress,
    ".xz": lzma.compress,
}
_OUTPUT = INPUT / "tokens"


def make_tokenizer(folder: Path) -> None:
    """A small byte-level tokenizer with a token that ends documents."""
    library = Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    library.train_from_iterator(_TEXTS, trainer)
    folder.mkdir()
    library.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))


def _jsonl(records: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


# Corpora to tokenize


def _make_lines(suffix: str, compression: str) -> None:
    INPUT.mkdir()
    make_tokenizer(TOKENIZER)
    content = _jsonl(_RECORDS) if suffix == ".jsonl" else "\n".join(_TEXTS).encode()
    (INPUT / f"a{suffix}{compression}").write_bytes(_COMPRESS[compression](content))
    POOL.mkdir()
    compress = _COMPRESS[compression]
    # Members and frames one after the other are one text.
    piece, repeats = (2**24, 32) if compression else (2**20, 16)
    for name, block in {
        "zeros": bytes(piece),
        "empty lines": b"\n" * (piece // 8),
        "bad lines": b"x\n" * 2**18,
    }.items():
        (POOL / name).write_bytes(compress(block) * repeats)
    (POOL / "a long line").write_bytes(compress(b'{"text": "' + b"a " * 2**22 + b'"}\n'))
    (POOL / "json array").write_bytes(compress(json.dumps(_RECORDS).encode()))
    (POOL / "windows").write_bytes(compress(b"\xef\xbb\xbf" + content.replace(b"\n", b"\r\n")))
    (POOL / "utf-16").write_bytes(compress(content.decode().encode("utf-16")))
    (POOL / "another compression").write_bytes(
        lzma.compress(content) if compression != ".xz" else gzip.compress(content)
    )


def _damage_lines(root: Path, pool: Path, draw: random.Random) -> str:
    """Any damage, an odd file, or damage to the text inside a compressed file."""
    (file,) = root.iterdir()
    choice = draw.random()
    if choice < 0.15:
        odd = draw.choice(sorted(pool.iterdir()))
        shutil.copyfile(odd, file)
        return f"{file}: {odd.name}" + (f"; {damage_any(root, pool, draw)}" if draw.random() < 0.2 else "")
    if choice < 0.5 and file.suffix in _COMPRESS:
        plain = file.with_suffix("")
        plain.write_bytes(_jsonl(_RECORDS))
        what = damage_file(plain, [plain, file], draw)
        file.write_bytes(_COMPRESS[file.suffix](plain.read_bytes()))
        plain.unlink()
        return f"inside {file}: {what}"
    return damage_any(root, pool, draw)


def _make_table(write: Callable[[pa.Table, Path], None], name: str) -> None:
    make_tokenizer(TOKENIZER)
    path = INPUT / name
    path.parent.mkdir(parents=True)
    write(pa.Table.from_pylist(_RECORDS), path)
    POOL.mkdir()
    for number, (kind, table) in enumerate(odd_tables.tables()):
        try:
            write(table, POOL / f"{number:02d} {kind}")
        except (pa.ArrowException, NotImplementedError):
            (POOL / f"{number:02d} {kind}").unlink(missing_ok=True)


def _write_parquet(table: pa.Table, path: Path) -> None:
    large = table.nbytes > 2**24
    rows = 25 if len(table) < 100 else len(table)
    # A dictionary page may be of any size: a bomb of repeats has a single value.
    options = {"compression": "zstd", "dictionary_pagesize_limit": 2**30}
    repeats = pa.types.is_dictionary(table.schema.types[0]) if table.schema.types else True
    pq.write_table(table, path, row_group_size=rows, use_dictionary=repeats, write_statistics=not large, **options)


def _write_arrow(table: pa.Table, path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd" if table.nbytes > 2**20 else None)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema, options=options) as stream:
        stream.write_table(table, max_chunksize=25 if len(table) < 100 else None)


def _make_saved_dataset() -> None:
    """As `datasets` saves two splits."""
    _make_table(_write_arrow, "train/data-00000-of-00001.arrow")
    shutil.copytree(INPUT / "train", INPUT / "test")
    for split in ("train", "test"):
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_fingerprint": "f", "_split": split}
        (INPUT / split / "state.json").write_text(json.dumps(state))
        (INPUT / split / "dataset_info.json").write_text(json.dumps({"features": {}}))
    (INPUT / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))


def _damage_table(root: Path, pool: Path, draw: random.Random) -> str:
    """Any damage, or an odd table, which may be damaged too."""
    if draw.random() < 0.4:
        file = draw.choice(sorted(path for path in root.rglob("*") if path.suffix in (".parquet", ".arrow")))
        odd = draw.choice(sorted(pool.iterdir()))
        shutil.copyfile(odd, file)
        return f"{file}: {odd.name}" + (f"; {damage_any(root, pool, draw)}" if draw.random() < 0.5 else "")
    return damage_any(root, pool, draw)


def _tokenize(inputs: str, prompt_key: str | None = None) -> dict[str, str]:
    """Makes a corpus; what it accepts must be what the file holds."""
    # Several units of a small file. A bomb, which is small too, would have a million of them.
    sizes = {path.suffix: path.lstat().st_size for path in INPUT.rglob("*")}
    unit_bytes = 1000 if sum(sizes.values()) < 2**17 and not sizes.keys() & _COMPRESS.keys() - {""} else None
    job = Job((inputs,), str(TOKENIZER), Path("tokens"), prompt_key=prompt_key, unit_bytes=unit_bytes)
    with _forked_worker() as workers:
        manifest = preprocess(job, workers, max_bad_fraction=0.5)
    for file in input_files([inputs]):
        # Texts that are not UTF-8 are among the rejected records, which are counted.
        if file.suffix in (".parquet", ".arrow") and not manifest.rejected:
            _require_valid_table(file, list(job.keys.all))
    TokenCorpus(job.output).check()
    return {"documents": str(manifest.documents)}


@contextlib.contextmanager
def _forked_worker() -> Iterator[Workers]:
    """A worker as tools/preprocess_data.py has it, which may die; forked from this process, which has imported all."""
    fork = multiprocessing.get_context("fork")
    with patch.object(multiprocessing, "get_context", lambda _: fork), local_workers(1, isolated=True) as workers:
        yield workers


def _require_valid_table(path: Path, columns: list[str]) -> None:
    try:
        if path.suffix == ".parquet":
            pq.read_table(path, columns=columns, use_threads=False, memory_map=True).validate(full=False)
        else:
            pa.ipc.open_stream(pa.memory_map(str(path))).read_all().select(columns).validate(full=True)
    except (pa.ArrowException, OSError) as error:
        raise SilentChangeError(f"{path}: accepted, but pyarrow finds: {error}") from None


# The state of a killed tokenization, and finished corpora


class _KilledWorkers(Workers):
    """Dies after some units of work."""

    def __init__(self, results: int) -> None:
        super().__init__(None)
        self._left = results

    def run(self, function: Callable[[Any], Any], tasks: Iterable[Any], **options: Any) -> Iterator[Any]:
        for result in super().run(function, tasks, **options):
            yield result
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt


def _job(prompt_key: str | None) -> Job:
    inputs = ("texts/a.jsonl", "texts/b.jsonl.gz")
    return Job(inputs, str(TOKENIZER), _OUTPUT, prompt_key=prompt_key, heldout_fraction=0.2, unit_bytes=1500)


def _make_unfinished(prompt_key: str | None, units: int = 4) -> None:
    make_tokenizer(TOKENIZER)
    texts = Path("texts")
    texts.mkdir()
    bad = b'{"no": "text"}\n'
    (texts / "a.jsonl").write_bytes(_jsonl(_RECORDS[:30]) + bad)
    (texts / "b.jsonl.gz").write_bytes(gzip.compress(_jsonl(_RECORDS[30:]), mtime=0))
    splits = 2
    try:
        preprocess(_job(prompt_key), _KilledWorkers(splits + units), max_bad_fraction=0.5)
    except KeyboardInterrupt:
        return


def _make_finished(prompt_key: str | None) -> None:
    _make_unfinished(prompt_key, units=10**6)


def _resume(prompt_key: str | None) -> dict[str, str]:
    """Ends the work; the corpus must be that of an undisturbed job, to the last byte."""
    preprocess(_job(prompt_key), Workers(None), max_bad_fraction=0.5)
    folders = (_OUTPUT, _OUTPUT.with_name("tokens.heldout"))
    made = [path for folder in folders for path in sorted(folder.iterdir()) if path.suffix in _OF_A_CORPUS]
    return {"corpus": files_digest(made)}


_OF_A_CORPUS = (".bin", ".idx", ".npy", ".json", ".jsonl")


def _again(prompt_key: str | None) -> dict[str, str]:
    preprocess(_job(prompt_key), Workers(None), max_bad_fraction=0.5)
    return {"tokens": _tokens_digest()}


def _inspect(prompt_key: str | None) -> dict[str, str]:
    call(inspect_data, _OUTPUT, "--tokenizer", TOKENIZER, "--verify")
    return {"train": _tokens_digest(_OUTPUT)}


def _train_on(prompt_key: str | None) -> dict[str, str]:
    """Reads every sample as training does, after the check of its preflight."""
    found = {}
    for folder in (_OUTPUT, _OUTPUT.with_name("tokens.heldout")):
        corpus = TokenCorpus(folder, tokenizer_fingerprint=load_tokenizer(TOKENIZER).fingerprint)
        corpus.check(blocks=SAMPLED_BLOCKS)
        parts = []
        for whole in (False, True):
            packed = PackedCorpus(corpus, 64, padding=0, document_mask=True, whole_documents=whole)
            parts += [np.ascontiguousarray(array).tobytes() for at in range(len(packed)) for array in packed[at]]
        found[folder.name] = digest(parts)
    return found


def _tokens_digest(*folders: Path) -> str:
    """Of the files that hold tokens, by the names that the sound corpus has."""
    chosen = folders or (_OUTPUT, _OUTPUT.with_name("tokens.heldout"))
    return files_digest(folder / name for folder in chosen for name in _sound_names(folder))


def _sound_names(folder: Path) -> list[str]:
    return json.loads((Path("names") / f"{folder.name}.json").read_text())


def _make_finished_with_names(prompt_key: str | None) -> None:
    """A finished corpus, and beside it the names of its files."""
    _make_finished(prompt_key)
    Path("names").mkdir()
    for folder in INPUT.iterdir():
        names = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".idx", ".npy"))
        (Path("names") / f"{folder.name}.json").write_text(json.dumps(names))


def _subjects() -> Iterator[Subject]:
    for suffix, compression in ((".jsonl", ""), (".jsonl", ".gz"), (".jsonl", ".zst"), (".jsonl", ".xz"), (".txt", "")):
        name = f"a{suffix}{compression}"
        prompts = "prompt" if compression == ".gz" else None
        make, read = partial(_make_lines, suffix, compression), partial(_tokenize, str(INPUT / name), prompts)
        yield Subject("corpora", name, make, read, damage=_damage_lines)
    parquet = str(INPUT / "a.parquet")
    make = partial(_make_table, _write_parquet, "a.parquet")
    yield Subject("corpora", "parquet", make, partial(_tokenize, parquet), damage=_damage_table)
    read = partial(_tokenize, str(INPUT), "prompt")
    yield Subject("corpora", "datasets", _make_saved_dataset, read, damage=_damage_table)
    for name, prompt_key in (("plain", None), ("prompts", "prompt")):
        unfinished, finished = partial(_make_unfinished, prompt_key), partial(_make_finished_with_names, prompt_key)
        yield Subject("unit state", name, unfinished, partial(_resume, prompt_key), exact=True, damage=_damage_state)
        for use, read_finished in {"again": _again, "inspect": _inspect, "train": _train_on}.items():
            reader = partial(read_finished, prompt_key)
            yield Subject("finished corpora", f"{name}, {use}", finished, reader, exact=True)


def _damage_state(root: Path, pool: Path, draw: random.Random) -> str:
    """Any damage, half of the time to the records of the units."""
    state = _OUTPUT / ".units"
    if draw.random() < 0.05:
        return make_odd(state, draw)
    return damage_any(draw.choice((root, state)), pool, draw)


SUBJECTS = list(_subjects())
