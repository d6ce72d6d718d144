"""Whether all nodes read the same base, tokenizer, expansion and corpora, and undamaged ones.

Small files are hashed whole. Of the base's weights, which may be hundreds of GB, each node hashes
blocks spread evenly over every file, with its header and its end. That finds another model,
another version, and a file that was cut short or copied in part. It does not find a flipped byte
between the blocks: training hashes every byte later, on one node.
"""

from __future__ import annotations

import torch.distributed as dist

from pipeline.checks.inputs import RunInputs
from pipeline.checks.preflight.allocation import Allocation
from pipeline.checks.preflight.findings import Fault, Finding
from pipeline.config.method import starts_from_expansion
from pipeline.data.corpus.manifest import MANIFEST
from pipeline.data.corpus.token_corpus import SAMPLED_BYTES
from pipeline.data.tokenize.corpora import heldout_folder, train_folder
from pipeline.data.tokenizer.tokenizer_file import tokenizer_file
from pipeline.errors import DataError
from pipeline.expansion_folder import MANIFEST as EXPANSION_MANIFEST
from pipeline.files.hashes import file_hash, sampled_hash
from pipeline.parallel.ranks import all_gathered, run_on_all_ranks

BLOCKS = 512
"""The number of hashed blocks over all weight files; each file has at least two."""


def check_same_files(allocation: Allocation) -> Finding:
    """The files that every node reads have the same hashes on all nodes as on the first."""

    def hashes_here() -> dict[str, str]:
        if not allocation.is_first_on_node:
            return {}
        return _hashes(allocation.inputs)

    nodes = allocation.nodes
    hashes = all_gathered(run_on_all_ranks(hashes_here))
    faults: list[Fault] = []
    for rank in allocation.first_ranks:
        for name in sorted({*hashes[0], *hashes[rank]}):
            if hashes[rank].get(name) != hashes[0].get(name):
                faults.append(
                    Fault(
                        f"{name}: differs between {nodes[rank]} and {nodes[0]}; every node must "
                        "read the same file: copy it there again, or use a file system that all "
                        "nodes share"
                    )
                )
    result = f"are the same on {len(allocation.first_ranks)} node(s)"
    if faults:
        result = "differ between nodes"
    files = "base (sizes, headers and sampled blocks), tokenizer, expansion and corpora"
    return Finding(f"{files} {result}", faults)


def _hashes(inputs: RunInputs) -> dict[str, str]:
    """The hashes of the files on this node, by name."""
    config = inputs.config
    small_files = [config.base / "config.json", tokenizer_file(config.tokenizer)]
    if starts_from_expansion(config.method):
        small_files.append(config.initial_expansion_folder / EXPANSION_MANIFEST)
    for name in config.data.corpora:
        small_files.append(train_folder(config.data, name) / MANIFEST)
        small_files.append(heldout_folder(config.data, name) / MANIFEST)
    hashes: dict[str, str] = {}
    weight_files = inputs.base.files
    for file in weight_files:
        hashes[str(file)] = sampled_hash(file, max(2, BLOCKS // len(weight_files)))
    for file in small_files:
        hashes[str(file)] = file_hash(file) if file.exists() else "missing"
    return hashes


def check_corpora(allocation: Allocation) -> Finding:
    """The corpora's sizes, indexes and some of their tokens are those of their manifests.

    Each rank reads its share of the tokens.
    """
    corpora = allocation.inputs.samples.corpora
    nodes = allocation.nodes
    sampled_bytes = SAMPLED_BYTES // len(nodes) // max(1, len(corpora))
    share = (dist.get_rank(), len(nodes))

    def damaged() -> list[str]:
        found: list[str] = []
        for corpus in corpora:
            try:
                corpus.check(sampled=sampled_bytes, share=share)
            except DataError as error:
                found.append(str(error))
        return found

    by_rank = all_gathered(run_on_all_ranks(damaged))
    faults: list[Fault] = []
    for rank, texts in enumerate(by_rank):
        for text in texts:
            faults.append(Fault(f"{text} (seen on {nodes[rank]})"))
    result = "are damaged" if faults else "are those that were written"
    token_bytes = sum(corpus.token_bytes for corpus in corpora)
    sampled = f"{SAMPLED_BYTES // 2**20} MiB of tokens"
    if token_bytes <= SAMPLED_BYTES:
        sampled = f"all tokens ({token_bytes / 2**20:,.1f} MiB)"
    return Finding(f"corpora: sizes, indexes and {sampled} {result}", faults)
