"""A pretrained model's Hugging Face folder: its files, their hashes, any slice of any parameter.

No code from the folder is run: only safetensors and JSON are read. `model.families` maps our
parameter names to those of the folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from pipeline.errors import BaseModelError
from pipeline.files.hashes import file_hash
from pipeline.files.json_files import read_object
from pipeline.files.reading import is_plain_name
from pipeline.files.threads import in_threads
from pipeline.model.families import HfTensor, hf_tensor
from pipeline.model.new_tokens import NewTokens
from pipeline.model.spec import DecoderSpec
from pipeline.parallel.sharding import REPLICATED, Partition, Rows, StoredTensor, read_shard, split

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
ADAPTER_FILE = "adapter_config.json"
T = TypeVar("T")
_ROWS = 2**13
# Of config.json: the file that transformers reads in place of these.
_WEIGHTS_ENTRY = "transformers_weights"
_TYPES = ("F16", "BF16", "F32", "F64")
"""The types of weights, as safetensors names them; others are quantized, or no weights."""


@dataclass(frozen=True)
class BaseFolder:
    """The weights of a Hugging Face folder, read tensor by tensor and slice by slice.

    Attributes:
        path: the folder.
        spec: its architecture.
        new_tokens: by what the run extends the vocabulary; None where it does not.
    """

    path: Path
    spec: DecoderSpec
    new_tokens: NewTokens | None = field(default=None, compare=False)

    @property
    def is_read_whole(self) -> bool:
        """Whether its weights are read all at once, and not parameter by parameter."""
        return False

    @cached_property
    def file_of(self) -> dict[str, Path]:
        """The file of each of the folder's tensors.

        Raises:
            BaseModelError: as `files_by_tensor`.
        """
        return files_by_tensor(self.path)

    @property
    def files(self) -> list[Path]:
        """The weight files, sorted."""
        return sorted(set(self.file_of.values()))

    @cached_property
    def hashes(self) -> dict[str, str]:
        """The SHA-256 of every weight file, by file name: the identity of a base."""
        names = [file.name for file in self.files]
        return dict(zip(names, in_threads(file_hash, self.files), strict=True))

    def set_known_hashes(self, hashes: Mapping[str, str]) -> None:
        """Takes the hashes from ranks that read a share of the files each."""
        vars(self)["hashes"] = dict(sorted(hashes.items()))

    @cached_property
    def dtype(self) -> torch.dtype:
        """The type that the base was published in."""
        return self.read("final_norm.base.weight").dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """The unsharded shape of the base parameter `name` (ours), from its file's header.

        Raises:
            BaseModelError: if it is missing, its file damaged, or the experts that it is of are not
                of one size.
        """
        source = self._source(name)
        shapes = self._read_each(source.names(), lambda view: tuple(view.get_shape()))
        first = shapes[0]
        if len(set(shapes)) > 1:
            raise BaseModelError(
                f"{self.path}: the experts of {source.name} differ in size; use the original model"
            )
        if source.experts is not None:
            return (len(shapes), *first)
        if source.three_16_bit_rows:
            return (3, *first)
        part = source.part
        if part is not None and first[:1] == (part.groups * part.group_rows,):
            return (part.groups * part.rows, *first[1:])
        # `check_weights` refuses fused tensors of other sizes.
        return first

    def read(
        self,
        name: str,
        partition: Partition = REPLICATED,
        tp_rank: int = 0,
        tp_size: int = 1,
        rows: Rows | None = None,
    ) -> Tensor:
        """The shard of the base parameter `name` (ours) that `tp_rank` holds, or `rows` of it.

        Reads nothing else, unless the tensor holds several linear maps. The rows of a parameter of
        all experts are the experts.

        Raises:
            BaseModelError: if it is missing, or its file damaged.
        """
        source = self._source(name)
        first_row = 0
        taken = slice(None)
        if rows is not None:
            first_row = rows[0]
            taken = slice(*rows)
        if source.experts is not None:
            of_one = replace(partition, expert_rank=0, expert_size=1)
            if partition.dim is not None:
                # A dimension of one expert's matrix is the next one of the parameter.
                of_one = replace(of_one, dim=partition.dim - 1)
            held = source.names()[slice(*partition.experts(source.experts))]
            experts = self._read_each(
                held[taken], lambda view: read_shard(view, of_one, tp_rank, tp_size)
            )
            # transformers stores an expert a tensor; ours are one tensor, for a product over all of
            # them.
            stored = torch.stack(experts)
            first_row = 0
        elif source.part is not None or source.three_16_bit_rows:
            # A part of a fused tensor is not contiguous: it is read whole and cut. Such tensors are
            # one layer's.
            (whole,) = self._read_each(source.names(), lambda view: view[:])
            if source.part is not None:
                whole = source.part.of(whole)
            else:
                whole = three_16_bit_rows(whole)
            stored = split(whole, partition, tp_rank, tp_size)[taken]
        else:
            (stored,) = self._read_each(
                source.names(), lambda view: read_shard(view, partition, tp_rank, tp_size, rows)
            )
        if self.spec.residual is None:
            return stored
        # Rows that are channels of the residual stream are never split over ranks, so rows[0] is
        # the first channel.
        return self.spec.residual.restore(name, stored, first_row)

    def check_tie(self) -> None:
        """Checks that the output projection is the embedding where config.json says so.

        transformers uses what the files hold.

        Raises:
            BaseModelError: config.json ties them, and the files hold another output projection.
        """
        stored = hf_tensor("output.base", self.spec).name
        if not self.spec.tie_word_embeddings or stored not in self.file_of:
            return
        # By parts: both matrices may be gigabytes.
        for first in range(0, self.spec.vocab_size, _ROWS):
            rows = (first, min(first + _ROWS, self.spec.vocab_size))
            output = self.read("output.base", rows=rows)
            embedding = self.read("embedding.base.weight", rows=rows)
            if torch.equal(output, embedding):
                continue
            raise BaseModelError(
                f"{self.file_of[stored]}: config.json ties the output to the embedding, but "
                f"{stored} is another matrix, which transformers uses: set tie_word_embeddings to "
                "false in config.json"
            )

    def _source(self, name: str) -> HfTensor:
        """The tensor of the base parameter `name`; a tied output may be stored as the embedding
        only."""
        source = hf_tensor(name, self.spec)
        is_tied = name == "output.base" and self.spec.tie_word_embeddings
        if is_tied and source.name not in self.file_of:
            return self._source("embedding.base.weight")
        return source

    def _read_each(self, names: Iterable[str], use: Callable[[StoredTensor], T]) -> list[T]:
        """What `use` makes of each tensor. A file is opened once for those that follow each
        other."""
        found: list[T] = []
        for file, of_file in groupby(names, self._file):
            with opened_file(file) as tensors:
                found += [use(_checked(tensors.get_slice(name), file, name)) for name in of_file]
        return found

    def _file(self, tensor: str) -> Path:
        if tensor not in self.file_of:
            raise BaseModelError(
                f"{self.path}: lacks the tensor {tensor}; the weights do not fit config.json"
            )
        return self.file_of[tensor]


def files_by_tensor(folder: Path) -> dict[str, Path]:
    """The file of each tensor of a Hugging Face folder.

    This is the one rule for all who read such a folder. transformers has others: it prefers a
    single file to an index, takes whatever a file holds, and applies an adapter where peft is
    installed. So a folder is refused from which it would read other weights.

    Raises:
        BaseModelError: transformers would read other weights, or a file is missing or damaged.
    """
    _check_no_other_weights(folder)
    index = folder / INDEX_FILE
    try:
        names = read_object(index, BaseModelError, "copy the folder again").get("weight_map")
    except FileNotFoundError:
        only = folder / SINGLE_FILE
        return dict.fromkeys(_tensors_in(only), only)
    if not isinstance(names, dict) or not all(
        isinstance(name, str) and is_plain_name(name) for name in names.values()
    ):
        raise BaseModelError(f"{index}: not an index of files in its folder; do not use this model")
    named = sorted(set(names.values()))
    if (folder / SINGLE_FILE).exists() and named != [SINGLE_FILE]:
        raise BaseModelError(
            f"{folder / SINGLE_FILE}: {INDEX_FILE} beside it names other files, and transformers "
            "would read this one instead; move away whichever is not the model"
        )
    for name in named:
        for tensor in _tensors_in(folder / name):
            listed = names.get(tensor)
            # transformers reads every tensor of a file that the index names, whether the index
            # lists it or not.
            if listed is None:
                raise BaseModelError(
                    f"{index}: lacks the tensor {tensor}, which {name} holds; copy the folder again"
                )
            if listed != name:
                raise BaseModelError(
                    f"{index}: names {listed} for {tensor}, and {name} holds one too, which "
                    "transformers may read; "
                    "copy the folder again"
                )
    return {tensor: folder / name for tensor, name in names.items()}


def _check_no_other_weights(folder: Path) -> None:
    """Refuses a folder whose config.json names a file of weights, or with an adapter beside the
    weights.

    Raises:
        BaseModelError: one of these is so.
    """
    adapter = folder / ADAPTER_FILE
    if adapter.exists():
        raise BaseModelError(
            f"{adapter}: an adapter, which transformers applies where peft is installed; merge it "
            "into the weights (merge_and_unload of peft), or move it away"
        )
    config: dict[str, Any] = {}
    with suppress(FileNotFoundError):
        config = read_object(folder / "config.json", BaseModelError, "copy the folder again")
    other = config.get(_WEIGHTS_ENTRY)
    if other is not None:
        raise BaseModelError(
            f"{folder / 'config.json'}: {_WEIGHTS_ENTRY}: expected none, found {other!r:.80}; name "
            f"these files {SINGLE_FILE} or {INDEX_FILE}, and remove the entry"
        )


def _tensors_in(file: Path) -> list[str]:
    with opened_file(file) as tensors:
        return list(tensors.keys())


@contextmanager
def opened_file(file: Path) -> Iterator[Any]:  # safetensors has no types
    """An open file of weights.

    Raises:
        BaseModelError: it is missing or damaged, or the block finds it damaged.
    """
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except FileNotFoundError:
        raise BaseModelError(
            f"{file}: no such file; a base model needs its weights as safetensors"
        ) from None
    except (SafetensorError, OSError, MemoryError) as error:
        raise BaseModelError(f"{file}: damaged ({error}); copy the file again") from None


def _checked(view: StoredTensor, file: Path, tensor: str) -> StoredTensor:
    if view.get_dtype() not in _TYPES:
        raise BaseModelError(
            f"{file}: {tensor} is of type {view.get_dtype()}, expected one of {', '.join(_TYPES)}; "
            "use the original model"
        )
    return view


def three_16_bit_rows(values: Tensor) -> Tensor:
    """values: [size] -> three rows in bf16, as fp32, whose sum they are to the last bit in fp32."""
    rows: list[Tensor] = []
    rest = values.float()
    # Three times 8 bits of mantissa cover the 24 of fp32; each rest is exact, because it is what
    # rounding left.
    for _ in range(3):
        row = rest.bfloat16().float()
        rows.append(row)
        rest = rest - row
    return torch.stack(rows)
