"""Where ZeRO puts each parameter: pure arithmetic over the flat tensors that the data-parallel ranks save.

DeepSpeed flattens the parameters that train and cuts them over the ranks. Stages 1 and 2 join all parameters of a group
first and cut once, so that a rank holds a run of whole parameters; stage 3 cuts every parameter in equal pieces.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fragment:
    """`length` elements from `start` on in flat tensor number `group` of data-parallel rank `dp_rank`."""

    dp_rank: int
    group: int
    start: int
    length: int


Fragments = dict[str, list[Fragment]]
"""For every parameter the runs that make up its flattened values, in order."""

Slices = Mapping[str, tuple[int, int]]
"""Start and length, by parameter name."""


Span = tuple[int, int]
"""The first element of a flattened tensor, and the one past the last."""


def overlapping(fragments: Sequence[Fragment], span: Span) -> Iterator[Fragment]:
    """The parts of `fragments`, which follow one another in a flattened tensor, that hold its elements in `span`."""
    at = 0
    for fragment in fragments:
        first, stop = max(span[0], at), min(span[1], at + fragment.length)
        if first < stop:
            yield replace(fragment, start=fragment.start + first - at, length=stop - first)
        at += fragment.length


def joined_and_cut(slices: Sequence[Sequence[Slices]]) -> Fragments:
    """The layout of stages 1 and 2, from what each rank says of each of its groups: `slices[dp_rank][group]`."""
    fragments: Fragments = {}
    for dp_rank, groups in enumerate(slices):
        for group, names in enumerate(groups):
            for name, (start, length) in names.items():
                fragments.setdefault(name, []).append(Fragment(dp_rank, group, start, length))
    return fragments


def each_cut(sizes: Mapping[str, int], group_sizes: Sequence[int], dp_size: int) -> Fragments:
    """The layout of stage 3: each parameter is padded to a multiple of `dp_size` and cut into equal pieces.

    `sizes` are the parameters' numbers of elements, in the order in which DeepSpeed flattened them; `group_sizes` are
    the lengths of a rank's flat tensors.

    Raises:
        ValueError: the parameters do not fill the flat tensors exactly.
    """
    places = _places(group_sizes)
    fragments: Fragments = {}
    at = 0
    for name, size in sizes.items():
        piece = -(-size // dp_size)
        group, first = next(((group, first) for group, first, stop in places if first <= at < stop), (-1, 0))
        if piece and (group < 0 or at + piece > first + group_sizes[group]):
            raise ValueError(f"{name} does not fit the flat tensors of {dp_size} ranks")
        # The last pieces hold the padding.
        lengths = (min(piece, max(0, size - dp_rank * piece)) for dp_rank in range(dp_size))
        fragments[name] = [Fragment(rank, group, at - first, length) for rank, length in enumerate(lengths) if length]
        at += piece
    if at != sum(group_sizes):
        raise ValueError(f"the parameters take {at} of the {sum(group_sizes)} elements in the flat tensors")
    return fragments


def _places(group_sizes: Sequence[int]) -> list[tuple[int, int, int]]:
    """Each group's number, and its first and last-but-one place in the row of all groups."""

    def places() -> Iterator[tuple[int, int, int]]:
        first = 0
        for group, size in enumerate(group_sizes):
            yield group, first, first + size
            first += size

    return list(places())
