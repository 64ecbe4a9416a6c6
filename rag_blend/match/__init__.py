"""Where stored chunks lie in the token ids of a whole prompt.

The prompt is tokenised once, exactly as stock Hugging Face would, and never changed; this package only finds
which stretches of it are chunks whose keys and values are stored. No separators and no hints are needed:
cut, repeated, adjacent and overlapping chunks are found at any position, because *ids* are matched, not text.
(The CacheBlend paper, arXiv 2405.16444, is given the chunk borders; a framework's prompt does not show them.)

How it works:

1. every chunk leaves fingerprints: hashes of `window` consecutive ids, one each `window` tokens (`arrays`);
2. a prompt is hashed at every position, and each hash is looked up in sorted arrays (`postings`);
3. hits of one chunk on one diagonal (prompt position - chunk offset) form a candidate (`cover`);
4. best-supported first, a candidate's ids are fetched through the callback and compared, so a hash collision
   costs one comparison and can never become a wrong match (`cover`).

The index keeps hashes, not ids: 16 bytes a fingerprint and some 50 bytes a chunk, all in numpy arrays.
"""

from rag_blend.match.index import ChunkIndex, Match

__all__ = ["ChunkIndex", "Match"]
