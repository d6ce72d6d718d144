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


def damage(root: Path, draw: random.Random, *, values: bool) -> str:
    """Damages one to three random files below `root`; returns what was done.

    Without `values` JSON is only cut: no hash guards the values of a manifest.
    """
    done = []
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        if files := [
            path for path in sorted(root.rglob("*")) if path.is_file() and not path.is_symlink()
        ]:
            file = draw.choice(files)
            done.append(f"{file}: {_damage_file(file, draw, values)}")
    return "; ".join(done) or "nothing"


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
            return _change_a_value(file, content.decode(), draw)
        except (ValueError, yaml.YAMLError, IndexError):
            pass  # damaged before
    return _change_bytes(file, bytearray(content), draw)


def _change_bytes(file: Path, data: bytearray, draw: random.Random) -> str:
    """Anywhere, often in the header or the footer."""
    length = len(data)
    region = draw.choice((range(length), range(length), range(length)[:64], range(length)[-512:]))
    at = draw.choice(region) if region else 0
    size = min(draw.choice((1, 4, 8, 64, 4096)), length - at)
    kind = draw.choice(("flip", "flip", "overwrite", "cut", "insert", "integer"))
    if kind == "flip" and data:
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "overwrite":
        data[at : at + size] = draw.choice((b"", bytes(size), b"\xff" * size, draw.randbytes(size)))
    elif kind == "cut":
        del data[at:]
    elif kind == "insert":
        data[at:at] = draw.choice(
            (draw.randbytes(size), b"[" * 5_000, b"9" * 5_000, b"\xef\xbb\xbf", b"\r\n", b"\0")
        )
    elif kind == "integer":
        data[at - at % 8 : at - at % 8 + 8] = (draw.choice(_EXTREMES) % 2**64).to_bytes(8, "little")
    file.write_bytes(data)
    return f"{kind} at {at} of {length} bytes"


def _change_a_value(file: Path, text: str, draw: random.Random) -> str:
    """Changes or removes a random value of JSON, of a line of JSON, or of YAML; raises where it is
    none."""
    lines = text.split("\n") if file.suffix == ".jsonl" else [text]
    number = draw.randrange(max(1, len(lines) - 1))
    read, write = (
        (yaml.safe_load, yaml.safe_dump) if file.suffix == ".yaml" else (json.loads, json.dumps)
    )
    holder = {"": read(lines[number])}
    # Values deep in long lists are many, and alike: half of the time a place near the root is
    # taken.
    places = list(_places(holder))
    near = [place for place in places if len(place[2]) <= 3]
    parent, key, path = draw.choice(near if draw.random() < 0.5 else places)
    if draw.random() < 0.2 and parent is not holder:
        del parent[key]
    else:
        parent[key] = draw.choice(_VALUES)
    lines[number] = write(holder[""])
    file.write_text("\n".join(lines))
    return f"another value of {'.'.join(path)[:200]}"


def _places(parent: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any, tuple[str, ...]]]:
    """All (parent, key, path) of a tree."""
    for key in list(parent) if isinstance(parent, dict) else range(len(parent)):
        yield parent, key, (*path, str(key))
        if isinstance(parent[key], (dict, list)):
            yield from _places(parent[key], (*path, str(key)))
