"""Which stored chunks a prompt may use: grouped by the head they were cached behind, found by token ids."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import NamedTuple

import numpy as np

from rag_blend.chunk import GENERIC_HEAD, NO_TOKENS, ChunkOrigin, digest_ids
from rag_blend.errors import StoreUnavailableError
from rag_blend.label import ListedChunk
from rag_blend.match import ChunkIndex, Match
from rag_blend.plan import BlendPlan, plan_blend
from rag_blend.prompt import EDGE_TOKENS, common_prefix

logger = logging.getLogger(__name__)

TokenIdsOf = Callable[[str], np.ndarray]
ReadAhead = Callable[[Sequence[str]], Mapping[str, Exception]]
UnprimedKeyOf = Callable[[str, np.ndarray], str]
_BEST_FIRST = ("own", "shared", "none")  # see `ChunkOrigin.priming`
_CHUNKS_AT_ONCE = 4096  # whose ids are in memory while they are added


class Findings(NamedTuple):
    """What lies in a prompt.

    Attributes:
        prefix: Matches that are exact where they stand.
        chunks: Matches that can be blended, best first.
        elsewhere: Chunks that are stored, but only behind another head: not to be used.
        lost: Keys of chunks of which at least 16 tokens seem to lie in the prompt, but which could not be had. Those
            that are gone the catalog has removed, so each is reported once; those that their medium does not deliver
            at present it keeps for another time.
    """

    prefix: list[Match]
    chunks: list[Match]
    elsewhere: list[Match]
    lost: list[str]

    def plan(
        self,
        num_tokens: int,
        whole: Sequence[Match],
        is_lossless: Callable[[str], bool],
        kept: int = 0,
        kept_exact: bool = True,
    ) -> BlendPlan:
        """Lay out the prompt that these lie in.

        Args:
            num_tokens: Its length.
            whole: Those of `prefix` that may stay exact in it. If there are any, the others of `prefix` are not used.
            is_lossless: Whether the chunk of that key is stored as it was computed; others are blended.
            kept: See `plan_blend`, like the next.
            kept_exact: The same.
        """
        exact = [match for match in whole if is_lossless(match.key)]
        inexact = [match for match in whole or self.prefix if match not in exact]
        return plan_blend(num_tokens, exact, [*inexact, *self.chunks], kept=kept, kept_exact=kept_exact)


@dataclass(frozen=True, slots=True)
class _Group:
    """Chunks cached behind one head. Primed ones never are exact, and heads themselves are never anything else."""

    head_ids: np.ndarray | None  # None: cached without knowing the head
    priming: str  # see `ChunkOrigin`
    index: ChunkIndex

    @property
    def of_heads(self) -> bool:
        return self.head_ids is not None and not len(self.head_ids) and self.priming == "none"

    def suits(self, prompt_ids: np.ndarray) -> bool:
        """Whether the prompt begins with this head, but for tokens that may change at its end."""
        if self.head_ids is None:
            return True
        return common_prefix(self.head_ids, prompt_ids) >= len(self.head_ids) - EDGE_TOKENS

    def stands_first(self, match: Match, prompt_ids: np.ndarray) -> bool:
        """Whether the match stands directly behind the very head it was cached behind."""
        if self.head_ids is None or match.offset or match.start != len(self.head_ids):
            return False
        return common_prefix(self.head_ids, prompt_ids) == len(self.head_ids)


class ChunkCatalog:
    """All chunks of one model and tenant that were cached in a way this engine accepts.

    Not thread-safe: the engine serialises.

    Args:
        token_ids_of: Brings a stored chunk's ids; KeyError when it is gone, StoreUnavailableError when its medium
            does not answer.
        head_ids_of: Brings a head's ids from its digest; KeyError when unknown. Ids of another digest count as unknown.
        any_head: Blend chunks also behind a head they were not cached behind (never as exact).
        unprimed_key_of: From a head's digest and a chunk's ids to the key that the chunk has if it was not primed. If
            given, unprimed chunks are copies of primed ones: each is used where that one stands first, and is exact
            there, and nowhere else. None: they are chunks like others.
        read_ahead: Gets the keys for which ids will be asked for, and brings them all at once, so that each need not
            wait for the one before; tells which could not be had, with what `token_ids_of` would raise.
    """

    def __init__(
        self,
        token_ids_of: TokenIdsOf,
        head_ids_of: TokenIdsOf,
        any_head: bool = False,
        unprimed_key_of: UnprimedKeyOf | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self._token_ids_of = token_ids_of
        self._announce = None if read_ahead is None else partial(self._bring, read_ahead)
        self._head_ids_of = head_ids_of
        self._any_head = any_head
        self._unprimed_key_of = unprimed_key_of
        self._copies: set[str] = set()  # found by their keys, so their ids need not be indexed
        self._groups: dict[tuple[str, str], _Group] = {}
        self._lost: set[str] = set()  # gone, as one search found
        self._silent: set[str] = set()  # not to be had during one search
        self._reported_heads: set[str] = set()

    def __len__(self) -> int:
        """Chunks, each once, and heads."""
        return sum(len(group.index) for group in list(self._groups.values()))

    @property
    def num_copies(self) -> int:
        """Unprimed copies, which do not count as chunks."""
        return len(self._copies)

    def add(self, key: str, origin: ChunkOrigin, token_ids: np.ndarray) -> None:
        """Make a stored chunk known. A chunk whose head cannot be found any more is left out."""
        self.add_all([ListedChunk(key, origin, token_ids)])

    def add_all(self, chunks: Iterable[ListedChunk]) -> None:
        """Make stored chunks known: as if each was given to `add`, but many times faster."""
        rest = iter(chunks)
        while some := list(islice(rest, _CHUNKS_AT_ONCE)):
            by_group: defaultdict[tuple[str, str], list[ListedChunk]] = defaultdict(list)
            for chunk in some:
                by_group[chunk.origin.head, chunk.origin.priming].append(chunk)
            for (head, priming), theirs in by_group.items():
                self._add_some(head, priming, theirs)

    def remove(self, keys: Iterable[str]) -> None:
        """Forget chunks; unknown keys are ignored."""
        for key in keys:
            self._copies.discard(key)
            for group in self._groups.values():
                group.index.remove(key)

    def clear(self) -> None:
        """Forget all chunks."""
        self._groups.clear()
        self._copies.clear()

    def find(self, prompt_ids: np.ndarray, without: AbstractSet[str] = frozenset()) -> Findings:
        """Find stored chunks in a prompt.

        Args:
            prompt_ids: Its ids, int32, shape (num_tokens,).
            without: Keys that are not to be used now.
        """
        gone: set[str] = set()
        self._silent = set(without)
        while True:  # an index gives up after many chunks in vain
            found = self._find(prompt_ids)
            if not self._lost:
                return found._replace(lost=sorted(gone | self._silent - without))
            self.remove(self._lost)
            gone |= self._lost
            self._lost.clear()

    def keys_in(self, token_ids: np.ndarray, first: bool = False) -> set[str]:
        """Keys of the stored chunks that lie in these ids, behind whatever head they were cached.

        Args:
            token_ids: The ids, int32, shape (num_tokens,).
            first: With those of their unprimed copies.
        """
        keys = set()
        for (head, _), group in list(self._groups.items()):
            for match in group.index.match(token_ids):
                keys.add(match.key)
                if first and (copy := self._copy_of(match, head)):
                    keys.add(copy.key)
        return keys

    def _add_some(self, head: str, priming: str, chunks: Sequence[ListedChunk]) -> None:
        self._lost.difference_update(chunk.key for chunk in chunks)
        if self._unprimed_key_of is not None and priming == "none" and head != NO_TOKENS:
            self._copies.update(chunk.key for chunk in chunks)
            return
        try:
            group = self._group(head, priming)
        except KeyError:
            self._report_head(head)
            return
        self._reported_heads.discard(head)
        group.index.add_all((chunk.key, chunk.token_ids) for chunk in chunks)

    def _find(self, prompt_ids: np.ndarray) -> Findings:
        prefix: list[Match] = []
        chunks: list[tuple[bool, int, Match]] = []
        unsuited: list[_Group] = []
        for (head, _), group in self._groups.items():
            suits = group.suits(prompt_ids)
            if not (suits or self._any_head):
                unsuited.append(group)
                continue
            for match in group.index.match(prompt_ids):
                first = suits and group.stands_first(match, prompt_ids)
                if first and group.priming == "none":
                    prefix.append(match)
                    continue
                if first and (copy := self._copy_of(match, head)):
                    prefix.append(copy)
                if not group.of_heads:
                    # A chunk cached behind this very head is better than one cached behind an unknown one, and one
                    # that was primed, best with a text of its own, better than the same one that was not.
                    chunks.append((suits and group.head_ids is not None, _BEST_FIRST.index(group.priming), match))
        prefix.sort(key=lambda m: (m.start, -m.length))
        chunks.sort(key=lambda c: (not c[0], -c[2].length, c[2].start, c[1]))
        matches = [match for _, _, match in chunks]
        elsewhere = self._elsewhere(prompt_ids, unsuited, [*prefix, *matches])
        return Findings(prefix, matches, elsewhere, [])

    def _copy_of(self, match: Match, head: str) -> Match | None:
        """The same match in the unprimed copy of its chunk, if there is one."""
        if self._unprimed_key_of is None:
            return None
        try:
            key = self._unprimed_key_of(head, self._ids_or_lost(match.key))
        except KeyError:
            return None
        return replace(match, key=key) if key in self._copies and key not in self._silent else None

    def _elsewhere(self, prompt_ids: np.ndarray, groups: Iterable[_Group], usable: Iterable[Match]) -> list[Match]:
        """Matches of groups that do not suit, each place once, apart from what can be used anyway."""
        covered = np.zeros(len(prompt_ids), dtype=bool)
        for match in usable:
            covered[match.start : match.end] = True
        matches = []
        for match in (m for group in groups for m in group.index.match(prompt_ids)):
            if not covered[match.start : match.end].any():
                covered[match.start : match.end] = True
                matches.append(match)
        return matches

    def _group(self, head: str, priming: str) -> _Group:
        if (head, priming) not in self._groups:
            head_ids = None if head == GENERIC_HEAD else self._head_ids_of(head)
            if head_ids is not None and digest_ids(head_ids) != head:
                raise KeyError(head)  # exactness is claimed on the strength of these ids
            self._groups[head, priming] = _Group(
                head_ids, priming, ChunkIndex(self._ids_or_lost, announce=self._announce)
            )
        return self._groups[head, priming]

    def _bring(self, read_ahead: ReadAhead, keys: Sequence[str]) -> None:
        for key, error in read_ahead([key for key in keys if key not in self._silent]).items():
            (self._silent if isinstance(error, StoreUnavailableError) else self._lost).add(key)

    def _ids_or_lost(self, key: str) -> np.ndarray:
        if key in self._silent or key in self._lost:
            raise KeyError(key)
        try:
            return self._token_ids_of(key)
        except StoreUnavailableError as error:
            self._silent.add(key)
            raise KeyError(key) from error
        except KeyError:
            self._lost.add(key)
            raise

    def _report_head(self, head: str) -> None:
        """One warning for all chunks of a head."""
        if head not in self._reported_heads:
            logger.warning(
                "the head %s of stored chunks is damaged or unknown, they are not used; ingest again", head[:12]
            )
            self._reported_heads.add(head)
