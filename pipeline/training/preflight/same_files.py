"""Whether all nodes read the same: base, tokenizer, initial expansion, corpora, configuration.

Small files are hashed whole. Of the base's weights, which may be hundreds of GB, each node reads blocks that are spread
evenly over every file, its header and its end among them. That tells another model, another version or fine-tuning of
the same, and a file that was cut short or only half copied; not a flipped byte between the blocks. The first rank's
hash of every byte, which checkpoints and expansion are compared with, comes later and covers that node's files.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from pipeline.config.method import ScaleMethod
from pipeline.config.run import RunConfig
from pipeline.data import manifest as corpora
from pipeline.data.corpora import heldout_folder, train_folder
from pipeline.data.tokenizer import tokenizer_file
from pipeline.model.base_folder import BaseFolder
from pipeline.scale import expansion_folder as expansions
from pipeline.training.preflight.finding import Fault, Finding
from pipeline.training.preflight.ranks import Ranks
from pipeline.training.unison import in_unison

BLOCK_BYTES = 4096
BLOCKS = 512
"""Of all weight files together; each gives at least two."""

Digests = Mapping[str, str]


def sampled_hash(path: Path, blocks: int) -> str:
    """A hash of a file's size and of `blocks` blocks of it, the first and the last among them."""
    size = path.stat().st_size
    last = max(0, size - BLOCK_BYTES)
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        for number in range(blocks):
            file.seek(last * number // max(1, blocks - 1))
            digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def digests(config: RunConfig, base: BaseFolder) -> dict[str, str]:
    """What this node sees, by name."""
    weights = sorted(set(base.file_of.values()))
    seen = {str(file): sampled_hash(file, max(2, BLOCKS // len(weights))) for file in weights}
    seen["the configuration"] = hashlib.sha256(config.model_dump_json().encode()).hexdigest()
    for file in _small_files(config):
        seen[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else "missing"
    return seen


def _small_files(config: RunConfig) -> Iterator[Path]:
    yield config.base / "config.json"
    yield tokenizer_file(config.base)
    if isinstance(config.method, ScaleMethod):
        yield config.upscaled_folder / expansions.MANIFEST
    for name in config.data.corpora:
        yield train_folder(config.data, name) / corpora.NAME
        yield heldout_folder(config.data, name) / corpora.NAME


def check_same_files(config: RunConfig, base: BaseFolder, ranks: Ranks) -> Finding:
    """Compares what the nodes see; every rank must call it."""
    seen: list[Digests | None] = [None] * len(ranks.nodes)
    own = in_unison(lambda: digests(config, base) if ranks.speaks_for_node else None)
    dist.all_gather_object(seen, own)
    return judge_same_files(seen, ranks)


def judge_same_files(seen: Sequence[Digests | None], ranks: Ranks) -> Finding:
    """Compares `seen`, by rank, with what the first node sees."""
    by_node = {node: seen[first] or {} for node, first in ranks.first_on.items()}
    reference_node, reference = next(iter(by_node.items()))
    faults = tuple(
        Fault(
            f"{name}: {node} sees another one than {reference_node}; every node must read the same: copy it there "
            "again, or use a file system that all nodes share"
        )
        for node, own in by_node.items()
        for name in sorted({*reference, *own})
        if own.get(name) != reference.get(name)
    )
    says = "differ between nodes" if faults else f"are the same on {len(by_node)} node(s)"
    return Finding(f"base (sizes, headers and sampled blocks), tokenizer, corpora and configuration {says}", faults)
