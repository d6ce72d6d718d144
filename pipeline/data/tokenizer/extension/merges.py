"""Merges of new BPE tokens, learned from texts as an existing tokenizer cuts them."""

from __future__ import annotations

import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise

from pipeline.log import progress_bar

Word = tuple[str, ...]
"""The tokens of a stretch of text that no merge crosses, as the tokenizer's file spells them.

"" is never joined.
"""
Pair = tuple[str, str]

ROW_BITS = 6
"""A row is 64 characters: code points without their last 6 bits.

Their UTF-8 differs in the last byte only.
"""
_TIMES_AS_FREQUENT = 10
_ASCII_ROWS = 2


def foreign_character_rows(new: Counter[str], old: Counter[str]) -> list[int]:
    """The rows that hold letters of the new texts and are foreign to the old ones.

    Both texts are given as counts of their characters.

    Never those of ASCII. A row holds letters if most of its characters are letters or marks.
    Foreign: ten times as frequent in the new texts, where one occurrence too many is assumed in the
    old ones.
    """
    in_new: Counter[int] = Counter()
    in_old: Counter[int] = Counter()
    letters: Counter[int] = Counter()
    for counts, rows in ((new, in_new), (old, in_old)):
        for character, count in counts.items():
            rows[ord(character) >> ROW_BITS] += count
    for character, count in new.items():
        # Letters and marks: Unicode's categories L* and M*.
        if unicodedata.category(character)[0] in "LM":
            letters[ord(character) >> ROW_BITS] += count
    new_total = new.total()
    old_total = old.total() + 1
    foreign: list[int] = []
    for row, count in sorted(in_new.items()):
        # Rows of punctuation, emoji or box drawings are more frequent in some texts, too, and are
        # no script.
        holds_letters = 2 * letters[row] > count
        # count / new_total >= 10 · (in_old + 1) / old_total, in whole numbers.
        is_frequent = count * old_total >= _TIMES_AS_FREQUENT * (in_old[row] + 1) * new_total
        if row >= _ASCII_ROWS and holds_letters and is_frequent:
            foreign.append(row)
    return foreign


def row_pattern(rows: Collection[int]) -> re.Pattern[bytes]:
    """Matches UTF-8 that holds a character of `rows`, or all but the last byte of one.

    UTF-8 synchronizes itself: in valid text this matches nowhere but at such a character.
    """
    # The characters of a row share all bytes of their UTF-8 but the last. Without rows the pattern
    # matches nothing.
    beginnings = (chr(row << ROW_BITS).encode()[:-1] for row in rows)
    return re.compile(b"|".join(map(re.escape, beginnings)) or b"(?!)")


def learn_merges(
    words: Mapping[Word, int], may_join: Callable[[str, str], bool], *, limit: int, min_uses: int
) -> list[Pair]:
    """At most `limit` merges in the order in which they apply.

    Each time the most frequent pair that may be joined is.

    Ends early where no pair occurs `min_uses` times. A merge whose token nearly always ends up in a
    larger one is dropped, unless another needs it: each that is left occurs `min_uses` times, or
    builds a token that does. No two merges make the same token.

    Args:
        words: how often each occurs.
        may_join: whether two tokens may be joined. New tokens are asked about, too.
    """
    sequences = [list(word) for word in words]
    counts = list(words.values())
    pairs = _Pairs(may_join)
    for index, sequence in enumerate(sequences):
        pairs.count(sequence, counts[index], index)
    # The most frequent pair first; of equally frequent ones the first in the order of strings.
    queue = [(-count, pair) for pair, count in pairs.counts.items()]
    heapq.heapify(queue)
    learned: dict[str, Pair] = {}
    with progress_bar("learning merges", limit, " merges") as bar:
        while queue and len(learned) < limit:
            queued, pair = heapq.heappop(queue)
            count = pairs.counts[pair]
            new = "".join(pair)
            if count < min_uses or new in learned:
                continue
            # A heap has no way to lower an entry: old ones are corrected when they come up, as in
            # Dijkstra's algorithm with lazy deletion.
            if count != -queued:
                # Merges since it was queued have taken some of its occurrences: queue it with what
                # is left.
                heapq.heappush(queue, (-count, pair))
                continue
            # Counts of pairs with the new token rise, and are queued. Those that fall are found out
            # when they come up.
            raised: set[Pair] = set()
            for index in pairs.where.pop(pair):
                joined = _joined(sequences[index], pair, new)
                if len(joined) < len(sequences[index]):
                    pairs.count(sequences[index], -counts[index])
                    raised |= pairs.count(joined, counts[index], index, only_with=new)
                    sequences[index] = joined
            for other in sorted(raised):
                heapq.heappush(queue, (-pairs.counts[other], other))
            learned[new] = pair
            bar.update()
    uses: Counter[str] = Counter()
    for sequence, count in zip(sequences, counts, strict=True):
        for token in sequence:
            uses[token] += count
    return _worthwhile(learned, uses, min_uses)


class _Pairs:
    """How often each pair that may be joined occurs, and in which words it has occurred."""

    def __init__(self, may_join: Callable[[str, str], bool]) -> None:
        self._ask = may_join
        self._may_join: dict[Pair, bool] = {}
        self.counts: dict[Pair, int] = {}
        self.where: defaultdict[Pair, list[int]] = defaultdict(list)

    def count(
        self,
        sequence: Sequence[str],
        count: int,
        index: int | None = None,
        only_with: str | None = None,
    ) -> set[Pair]:
        """Adds the pairs of a word; with `index` notes where, if they hold `only_with`.

        Returns the pairs noted.
        """
        noted: set[Pair] = set()
        for pair in pairwise(sequence):
            allowed = self._may_join.get(pair)
            if allowed is None:
                allowed = self._may_join[pair] = self._ask(*pair)
            if not allowed:
                continue
            self.counts[pair] = self.counts.get(pair, 0) + count
            is_wanted = only_with is None or only_with in pair
            if index is not None and is_wanted and pair not in noted:
                self.where[pair].append(index)
                noted.add(pair)
        return noted


def _joined(sequence: Sequence[str], pair: Pair, new: str) -> list[str]:
    """The tokens of a word with every occurrence of `pair`, from the left, as the token `new`."""
    found: list[str] = []
    for token in sequence:
        # The last one found is never `new` itself here: a new token is longer than its parts.
        if found and (found[-1], token) == pair:
            found[-1] = new
        else:
            found.append(token)
    return found


def _worthwhile(learned: dict[str, Pair], uses: Counter[str], min_uses: int) -> list[Pair]:
    """The merges that save something, in order. A dropped token is used as its two parts again."""
    kept = dict(learned)
    users: Counter[str] = Counter()
    for pair in kept.values():
        users.update(set(pair))
    # What uses a token was learned after it, so that one pass from the end sees every user first.
    for new in reversed(learned):
        if users[new] == 0 and uses[new] < min_uses:
            pair = kept.pop(new)
            for part in pair:
                uses[part] += uses[new]
            users.subtract(set(pair))
    return [*kept.values()]
