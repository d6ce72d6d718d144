"""Random damage to the files of a folder: to their bytes, to the structure of JSON and YAML, or to their kind."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from tests.fuzz.odd_files import make_odd

_LARGEST = 2**24
"""Larger files are sparse, or bombs, and stay as they are."""
_MOST_PLACES = 20_000
_RAW = "@@raw@@"
_RAW_VALUES = (
    "[" * 100_000,
    "[" * 2_000 + "]" * 2_000,
    '{"a":' * 5_000 + "1" + "}" * 5_000,
    "1" * 5_000,
    "NaN",
    "-Infinity",
    "1e999",
    "0x10",
    '"\\ud800"',
)
"""Text that no serialiser would write."""
_VALUES: tuple[Any, ...] = (
    None, True, False, [], {}, 0, -1, 1.5, 2**31, 2**63, 10**30, -(10**30), 1e308, 1e-300, "", "0", "x" * 100_000, "\0",
    "../../etc/passwd", "/dev/zero", "/", ".", "input", [[]], [None], [-1], [10**30], {"": {}}, list(range(5000)),
    "step_9999999999999999999999999", "\u2028\u202e", "null",
)  # fmt: skip
_EXTREMES = (0, -1, 1, 2**31 - 1, -(2**31), 2**40, 2**62, -(2**63), 2**63 - 1)
_TEXT = (".json", ".jsonl", ".yaml", ".txt", "", ".lock")


def damage_any(root: Path, pool: Path, draw: random.Random) -> str:
    """Damages one to three random files below `root`; returns what was done."""
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        files = [path for path in sorted(root.rglob("*")) if _can_be_damaged(path)]
        if not files:
            break
        file = draw.choice(files)
        if draw.random() < 0.1:
            done.append(make_odd(draw.choice([file, file, file, file.parent]) if file.parent != root else file, draw))
        else:
            done.append(f"{file}: {damage_file(file, files, draw)}")
    return "; ".join(done) or "nothing"


def _can_be_damaged(path: Path) -> bool:
    return not path.is_symlink() and path.is_file() and path.stat().st_size < _LARGEST


def damage_file(file: Path, others: list[Path], draw: random.Random) -> str:
    """Damages the content of one file; returns what was done."""
    content = file.read_bytes()
    if file.suffix in _TEXT and draw.random() < 0.6:
        try:
            text, what = _restructure(file.suffix, content.decode(), draw)
            file.write_bytes(text.encode(errors="surrogatepass"))
            return what
        except (ValueError, yaml.YAMLError, RecursionError, IndexError):
            pass  # damaged before
    changed, what = damage_bytes(content, draw.choice(others).read_bytes, draw)
    file.write_bytes(changed)
    return what


def damage_bytes(content: bytes, other: Callable[[], bytes], draw: random.Random) -> tuple[bytes, str]:
    """`content` with random damage, perhaps with a part of another file in it."""
    data = bytearray(content)
    # The ends of a file hold its headers and footers.
    spread = draw.choice((len(data), len(data), min(len(data), 64), -min(len(data), 512)))
    at = draw.randrange(len(data) + spread, len(data)) if spread < 0 else draw.randrange(spread) if spread else 0
    size = min(draw.choice((1, 4, 8, 64, 4096)), len(data) - at)
    kind = draw.choice(
        ("flip", "flip", "overwrite", "cut", "remove", "repeat", "insert", "integer", "splice", "number")
    )
    if kind == "flip":
        for _ in range(draw.choice((1, 1, 2, 8))):
            if data:
                place = at if draw.random() < 0.5 else draw.randrange(len(data))
                data[place] ^= 1 << draw.randrange(8)
    elif kind == "overwrite":
        data[at : at + size] = draw.choice((bytes(size), b"\xff" * size, draw.randbytes(size)))
    elif kind == "cut":
        del data[at:]
    elif kind == "remove":
        del data[at : at + size]
    elif kind == "repeat":
        data[at:at] = data[at : at + size] * draw.choice((1, 2, 100))
    elif kind == "insert":
        data[at:at] = draw.choice((draw.randbytes(size), b"[" * 50_000, b"9" * 5_000, b"\xef\xbb\xbf", b"\r\n", b"\0"))
    elif kind == "integer":
        width = draw.choice((4, 8))
        at -= at % width
        data[at : at + width] = (draw.choice(_EXTREMES) % 2 ** (8 * width)).to_bytes(width, "little")
    elif kind == "splice":
        piece = other()
        start = draw.randrange(len(piece) + 1)
        data[at : at + draw.choice((0, size, len(data)))] = piece[start : start + draw.choice((64, 4096, len(piece)))]
    else:
        numbers = list(re.finditer(rb"-?\d+(\.\d+)?", content[:100_000]))
        if numbers:
            found = draw.choice(numbers)
            data[found.start() : found.end()] = str(draw.choice((*_EXTREMES, 10**30, "1e999", "NaN", "08"))).encode()
    return bytes(data), f"{kind} at {at} of {len(content)} bytes"


def _restructure(suffix: str, text: str, draw: random.Random) -> tuple[str, str]:
    """A text of JSON, JSON lines or YAML with a random value changed.

    Raises:
        ValueError, YAMLError: it is none.
    """
    if suffix == ".yaml":
        if draw.random() < 0.2:
            return _odd_yaml(text, draw)
        changed, what = _with_other_value(yaml.safe_load(text), draw)
        return yaml.safe_dump(changed, allow_unicode=True), what
    if suffix not in (".jsonl", ".json", ".lock"):
        raise ValueError(suffix)
    lines = text.split("\n") if suffix == ".jsonl" else [text]
    number = draw.randrange(max(1, len(lines) - 1))
    if draw.random() < 0.1 and len(lines) > 1:
        lines[number:number] = [lines[number]] * draw.choice((1, 100))
        return "\n".join(lines), f"line {number} repeated"
    changed, what = _with_other_value(json.loads(lines[number]), draw)
    written = json.dumps(changed, indent=2 if suffix == ".json" else None)
    lines[number] = written.replace(f'"{_RAW}"', draw.choice(_RAW_VALUES))
    return "\n".join(lines), f"line {number}, {what}"


def _odd_yaml(text: str, draw: random.Random) -> tuple[str, str]:
    """YAML that no serialiser would write."""
    lines = text.split("\n")
    number = draw.randrange(len(lines))
    laughs = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" if n else "l0: &l0 [x]" for n in range(12))
    name, odd = draw.choice(
        (
            ("a bomb of aliases", laughs),
            ("deep nesting", "deep: " + "[" * 20_000),
            ("a tag", "name: !!python/object/apply:os.system ['true']"),
            ("a line twice", lines[number]),
            ("a tab", "\tname: x"),
            ("a merge of itself", "a: &a\n  <<: *a"),
            ("two documents", "---\nname: other\n---"),
            ("a key that is a list", "? [a, b]\n: c"),
            ("a date", "name: 2001-01-01"),
        )
    )
    lines[number:number] = [odd]
    return "\n".join(lines), f"{name} before line {number}"


def _with_other_value(root: Any, draw: random.Random) -> tuple[Any, str]:
    """A tree of lists and mappings with one place in it changed.

    Raises:
        ValueError: it is too large, as a bomb of aliases is.
    """
    holder = {"": root}
    places = list(islice(_places(holder), _MOST_PLACES + 1))
    if len(places) > _MOST_PLACES:
        raise ValueError("too many places")
    # Values deep in long lists are many, and alike: half of the time a place near the root is taken.
    near = [place for place in places if len(place[2]) <= 3]
    parent, key, path = draw.choice(near if draw.random() < 0.5 else places)
    what = ".".join(path)
    kind = draw.choice(("replace", "replace", "replace", "replace", "remove", "add", "swap", "raw"))
    if kind == "remove" and parent is not holder:
        del parent[key]
    elif kind == "add" and isinstance(parent[key], dict):
        parent[key][draw.choice(("", "unknown", "format", "x" * 1000))] = draw.choice(_VALUES)
    elif kind == "add" and isinstance(parent[key], list):
        parent[key].append(draw.choice((*parent[key][:1], *_VALUES)))
    elif kind == "swap":
        other, other_key, other_path = draw.choice(places)
        parent[key], other[other_key] = json.loads(json.dumps([other[other_key], parent[key]]))
        what += f" and {'.'.join(other_path)}"
    else:
        kind = "replace" if kind != "raw" else kind
        parent[key] = _RAW if kind == "raw" else draw.choice(_VALUES)
        what += f" by {str(parent[key])[:40]!r}" if kind == "replace" else ""
    return holder[""], f"{kind} {what[:200]}"


def _places(parent: Any, path: tuple[str, ...] = ()) -> Any:
    """All (parent, key, path) of a tree."""
    for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
        yield parent, key, (*path, str(key))
        if isinstance(parent[key], (dict, list)):
            yield from _places(parent[key], (*path, str(key)))
