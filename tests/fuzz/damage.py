"""Random damage to the files of a folder: to their bytes, or to the values of JSON and YAML."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_VALUES: tuple[Any, ...] = (
    None, True, [], {}, 0, -1, 1.5, 2**31, 2**63, 10**30, 1e308, "", "0", "x" * 100_000, "\0", "../../etc/passwd", "/",
    [[]], [None], {"": {}}, list(range(5000)), "step_9999999999999999999999999",
)  # fmt: skip
_EXTREMES = (0, -1, 1, 2**31 - 1, 2**40, 2**62, -(2**63), 2**63 - 1)


def damage_any(root: Path, draw: random.Random, *, values: bool = True) -> str:
    """Damages one to three random files below `root`; returns what was done."""
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if files := [path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()]:
            file = draw.choice(files)
            done.append(f"{file}: {_damage_file(file, draw, values)}")
    return "; ".join(done) or "nothing"


def damage_bytes_only(root: Path, draw: random.Random) -> str:
    """The same, but JSON is only cut: no hash guards the values of a manifest."""
    return damage_any(root, draw, values=False)


def _damage_file(file: Path, draw: random.Random, values: bool) -> str:
    if draw.random() < 0.04:
        file.unlink()
        return "removed"
    content = file.read_bytes()
    is_text = file.suffix in (".json", ".jsonl", ".yaml")
    if is_text and not values:
        file.write_bytes(content[: draw.randrange(len(content) + 1)])
        return "cut"
    if is_text and draw.random() < 0.6:
        try:
            text, what = _with_other_value(file.suffix, content.decode(), draw)
            file.write_text(text)
            return what
        except (ValueError, yaml.YAMLError, IndexError):
            pass  # damaged before
    changed, what = _with_other_bytes(content, draw)
    file.write_bytes(changed)
    return what


def _with_other_bytes(content: bytes, draw: random.Random) -> tuple[bytes, str]:
    """`content` with random damage, often in the header or the footer."""
    data = bytearray(content)
    region = draw.choice((range(len(data)), range(len(data)), range(len(data))[:64], range(len(data))[-512:]))
    at = draw.choice(region) if region else 0
    size = min(draw.choice((1, 4, 8, 64, 4096)), len(data) - at)
    kind = draw.choice(("flip", "flip", "overwrite", "cut", "insert", "integer"))
    if kind == "flip" and data:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "overwrite":
        data[at : at + size] = draw.choice((b"", bytes(size), b"\xff" * size, draw.randbytes(size)))
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = draw.choice((draw.randbytes(size), b"[" * 5_000, b"9" * 5_000, b"\xef\xbb\xbf", b"\r\n", b"\0"))
    elif kind == "integer":
        data[at - at % 8 : at - at % 8 + 8] = (draw.choice(_EXTREMES) % 2**64).to_bytes(8, "little")
    return bytes(data), f"{kind} at {at} of {len(content)} bytes"


def _with_other_value(suffix: str, text: str, draw: random.Random) -> tuple[str, str]:
    """A text of JSON, JSON lines or YAML with a random value changed or removed; raises where it is none."""
    lines = text.split("\n") if suffix == ".jsonl" else [text]
    number = draw.randrange(max(1, len(lines) - 1))
    holder = {"": yaml.safe_load(text) if suffix == ".yaml" else json.loads(lines[number])}
    # Values deep in long lists are many, and alike: half of the time a place near the root is taken.
    places = list(_places(holder))
    near = [place for place in places if len(place[2]) <= 3]
    parent, key, path = draw.choice(near if draw.random() < 0.5 else places)
    if draw.random() < 0.2 and parent is not holder:
        del parent[key]
    else:
        parent[key] = draw.choice(_VALUES)
    lines[number] = yaml.safe_dump(holder[""]) if suffix == ".yaml" else json.dumps(holder[""])
    return "\n".join(lines), f"another value of {'.'.join(path)[:200]}"


def _places(parent: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """All (parent, key, path) of a tree."""
    for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
        yield parent, key, (*path, str(key))
        if isinstance(parent[key], (dict, list)):
            yield from _places(parent[key], (*path, str(key)))
