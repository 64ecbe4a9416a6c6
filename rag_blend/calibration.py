"""The verdict of a calibration: which selector and ratio come close enough to full prefill most cheaply, if any does.

It lives beside the chunks it was measured for, as a small record of their model, namespace and priming, and of their
codec if that is lossy: what comes close enough with the rows as they were computed may not with rounded ones.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Any

from rag_blend.chunk import digest_json
from rag_blend.selectors import selector_names
from rag_blend.store import KVStore

logger = logging.getLogger(__name__)

DEFAULT_TARGET_KL = 0.02
DEFAULT_TARGET_AGREEMENT = 0.97
_KIND = "calibration"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a calibration found.

    Attributes:
        selector: Name of the chosen selector; where none passed, of the one that came closest.
        ratio: Its ratio; None is its own default.
        passed: Whether it met the target and was faster than full prefill, by which prompts are to be served if not.
        target_kl: Largest mean KL(full || blended) that was allowed, nats.
        target_agreement: Smallest share of positions with the same most likely token that was allowed.
        kl: Its mean KL.
        agreement: Its share of such positions.
        recompute_ratio: Work it did on reusable tokens, see `GenerationStats.recompute_ratio`; the mean.
        gain: Full prefill's time to first token by its own, the mean, where it was measured.
        num_cases: Prompts it was measured on.
        date: When.
    """

    selector: str
    ratio: float | None
    passed: bool
    target_kl: float
    target_agreement: float
    kl: float
    agreement: float
    recompute_ratio: float
    gain: float
    num_cases: int
    date: str

    def to_json(self) -> bytes:
        """As a small record that tells when it was damaged."""
        record = {"kind": _KIND, **asdict(self)}
        return json.dumps({**record, "digest": digest_json(record)}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Verdict:
        """From a record made by `to_json`.

        Raises:
            ValueError: It is damaged, something else, or names a selector or ratio that does not exist.
        """
        try:
            record: dict[str, Any] = json.loads(data)
            digest = record.pop("digest")
            if record.get("kind") != _KIND or digest_json(record) != digest:
                raise ValueError("not a calibration, or damaged")
            del record["kind"]
            verdict = cls(**record)
            if verdict.selector not in selector_names():
                raise ValueError(f"there is no selector {verdict.selector!r}")
            if verdict.ratio is not None and not 0.0 <= verdict.ratio <= 1.0:
                raise ValueError(f"the ratio is {verdict.ratio}")
        except (LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a calibration: {error}") from error
        return verdict


def priming_of(prime: str, prime_tokens: int, prime_texts: int, exact_first: bool) -> str:
    """Names an engine's way of priming: chunks primed otherwise deserve a verdict of their own.

    Args:
        prime: `BlendEngine`'s argument of that name, like the others.
        prime_tokens: Length of a sampled text.
        prime_texts: Sampled texts per chunk.
        exact_first: Whether there are unprimed copies.
    """
    return json.dumps([prime] if prime == "none" else [prime, prime_tokens, prime_texts, exact_first])


def load_verdict(store: KVStore, priming: str) -> Verdict | None:
    """The verdict on this model, namespace, priming and codec; None if there is none that can be read.

    Args:
        store: Of the model and namespace; its codec is what new entries are written with.
        priming: See `priming_of`.
    """
    try:
        data = store.backend.get_record(_name(store, priming))
    except OSError as error:
        logger.warning("the calibration cannot be read, so the defaults serve: %s", error)
        return None
    if data is None:
        return None
    try:
        return Verdict.from_json(data)
    except ValueError as error:
        logger.warning("the calibration is ignored, calibrate again: %s", error)
        return None


def save_verdict(store: KVStore, priming: str, verdict: Verdict) -> None:
    """Record a verdict in the place of an earlier one.

    Args:
        store: See `load_verdict`.
        priming: See `priming_of`.
        verdict: The verdict.

    Raises:
        OSError: The storage refused.
    """
    name = _name(store, priming)
    store.backend.delete_record(name)  # of a record that is there, the first writer wins
    store.backend.put_record(name, verdict.to_json())


def _name(store: KVStore, priming: str) -> str:
    rounding = () if store.codec.lossless else (store.codec.name,)
    return store.record_name(_KIND, priming, *rounding)
