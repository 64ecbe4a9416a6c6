"""Labels tell what an entry is, or nothing."""

from __future__ import annotations

import json
from dataclasses import astuple

import numpy as np
import pytest

from rag_blend.chunk import ChunkOrigin, chunk_key
from rag_blend.label import label_of, read_label

ORIGIN = ChunkOrigin("f" * 64, "a tenant\nof two lines ä", "head", "prime")
IDS = np.array([10, 0, 2**31 - 1], dtype=np.int32)  # 10 is a newline
KEY = chunk_key(ORIGIN, IDS)


UNCHECKED = json.dumps([*astuple(ORIGIN)]).encode() + b"\n" + IDS.tobytes()  # as labels were at first


@pytest.mark.parametrize("label", [label_of(ORIGIN, IDS), UNCHECKED], ids=["label", "without a checksum"])
def test_a_label_says_what_it_was_made_of(label: bytes) -> None:
    listed = read_label(label, KEY)
    assert listed is not None
    assert (listed.key, listed.origin, listed.token_ids.tolist()) == (KEY, ORIGIN, IDS.tolist())
    assert listed.token_ids.dtype == np.int32


@pytest.mark.parametrize("label", [label_of(ORIGIN, IDS), UNCHECKED], ids=["label", "without a checksum"])
def test_any_damage_is_a_lost_label(label: bytes) -> None:
    for at in range(len(label)):
        assert read_label(label[:at], KEY) is None or label[:at] == UNCHECKED
        assert read_label(label[:at] + bytes([label[at] ^ 1]) + label[at + 1 :], KEY) is None
    assert read_label(label + b"\0", KEY) is None
    assert read_label(label, KEY[::-1]) is None


@pytest.mark.parametrize(
    "label", [b"", b"\n", b"null\n", b"[1]\n", b"[" * 100_000, b"\xff\n", b'["a","b","c","d"]\nab']
)
def test_what_is_no_label_is_lost(label: bytes) -> None:
    assert read_label(label, KEY) is None


def test_another_entry_has_another_label() -> None:
    assert read_label(label_of(ORIGIN, IDS[:-1]), KEY) is None
