"""Verdicts: kept beside the chunks, ignored when damaged, followed by engines whose ratio is "auto"."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import random_model
from transformers import GPT2Config, GPT2LMHeadModel

from rag_blend import BlendEngine, PolicyInfo, TokenSelector
from rag_blend.calibration import Verdict, load_verdict, priming_of, save_verdict
from rag_blend.chunk import digest_json
from rag_blend.codecs import codec_names, codec_of
from rag_blend.policy import PolicyChooser
from rag_blend.selectors.heads import HeadsSelector
from rag_blend.storage.memory import MemoryBackend
from rag_blend.store import KVStore

MakeEngine = Callable[..., BlendEngine]
VERDICT = Verdict(
    selector="random",
    ratio=0.4,
    passed=True,
    target_kl=0.02,
    target_agreement=0.97,
    kl=0.0123,
    agreement=0.98,
    recompute_ratio=0.41,
    gain=2.5,
    num_cases=24,
    date="2026-01-02 03:04 UTC",
)
FAILED = replace(VERDICT, selector="anchor", ratio=0.5, passed=False, kl=0.3)
PRIMING = priming_of("sample", 512, 2, True)


def store_of(
    backend: MemoryBackend | None = None, fingerprint: str = "model", namespace: str = "default", codec: str = "raw"
) -> KVStore:
    return KVStore(backend or MemoryBackend(), fingerprint, namespace, torch.float16, codec)


def prompt_of(texts: list[str]) -> str:
    return "\n\n".join(texts) + "\n\nwhich river?"


class TestRecord:
    @pytest.mark.parametrize("verdict", [VERDICT, FAILED, replace(VERDICT, selector="heads", ratio=None)])
    def test_round_trip(self, verdict: Verdict) -> None:
        store = store_of()
        assert load_verdict(store, PRIMING) is None
        save_verdict(store, PRIMING, verdict)
        assert load_verdict(store, PRIMING) == verdict

    def test_a_later_one_takes_the_place(self) -> None:
        store = store_of()
        save_verdict(store, PRIMING, VERDICT)
        save_verdict(store, PRIMING, FAILED)
        assert load_verdict(store, PRIMING) == FAILED

    def test_whatever_differs_has_its_own(self) -> None:
        backend = MemoryBackend()
        save_verdict(store_of(backend), PRIMING, VERDICT)
        assert load_verdict(store_of(backend, fingerprint="other"), PRIMING) is None
        assert load_verdict(store_of(backend, namespace="other"), PRIMING) is None
        for other in (("none", 512, 2), ("sample", 256, 2), ("sample", 512, 1), ("some text", 512, 2)):
            assert load_verdict(store_of(backend), priming_of(*other, True)) is None
        assert load_verdict(store_of(backend), priming_of("sample", 512, 2, False)) is None
        assert priming_of("none", 512, 2, True) == priming_of("none", 0, 1, False)  # nothing is primed either way

    @pytest.mark.parametrize("codec", [name for name in codec_names() if not codec_of(name).lossless])
    def test_rounded_caches_have_their_own(self, codec: str) -> None:
        backend = MemoryBackend()
        save_verdict(store_of(backend), PRIMING, VERDICT)
        assert load_verdict(store_of(backend, codec=codec), PRIMING) is None
        save_verdict(store_of(backend, codec=codec), PRIMING, FAILED)
        assert load_verdict(store_of(backend, codec=codec), PRIMING) == FAILED
        assert load_verdict(store_of(backend), PRIMING) == VERDICT

    def test_lossless_codecs_share_one(self) -> None:
        backend = MemoryBackend()
        save_verdict(store_of(backend, codec="zstd"), PRIMING, VERDICT)
        assert load_verdict(store_of(backend, codec="raw"), PRIMING) == VERDICT

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: data[:-5],
            lambda data: data.replace(b'"ratio": 0.4', b'"ratio": 0.1'),
            lambda data: b"\xff" + data,
            lambda data: b"[]",
            lambda data: b"",
            lambda data: b"[" * 100_000,
            lambda data: signed(json.loads(data), selector="of another version"),
            lambda data: signed(json.loads(data), ratio=3.0),
            lambda data: signed(json.loads(data), ratio="much"),
            lambda data: signed(json.loads(data), kind="prime-sample"),
            lambda data: signed(json.loads(data), unknown=1),
        ],
    )
    def test_a_damaged_one_is_ignored_with_a_warning(
        self, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
    ) -> None:
        store = store_of()
        name = store.record_name("calibration", PRIMING)
        store.backend.put_record(name, damage(VERDICT.to_json()))
        assert load_verdict(store, PRIMING) is None
        assert "the calibration is ignored, calibrate again" in caplog.text
        save_verdict(store, PRIMING, VERDICT)
        assert load_verdict(store, PRIMING) == VERDICT

    def test_an_undamaged_one_is_taken_when_signed_by_hand(self) -> None:
        """Or the test above would find damage where there is none."""
        assert Verdict.from_json(signed(json.loads(VERDICT.to_json()))) == VERDICT

    def test_a_medium_that_does_not_answer(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        store = store_of()
        save_verdict(store, PRIMING, VERDICT)

        def fail(name: str) -> bytes:
            raise OSError("gone fishing")

        monkeypatch.setattr(store.backend, "get_record", fail)
        assert load_verdict(store, PRIMING) is None
        assert "cannot be read" in caplog.text and "gone fishing" in caplog.text

    def test_it_does_not_disturb_forgetting(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(prime="sample", prime_tokens=16)
        engine.adopt(VERDICT)
        engine.ingest(texts, doc_ids=["a"] * len(texts), progress=False)
        assert engine.forget(["a"]).entries == len(texts)
        engine.refresh()
        assert engine.policy.source == "calibrated"


def signed(record: dict[str, Any], **changes: Any) -> bytes:
    """A record with the right digest, whatever is in it."""
    del record["digest"]
    record |= changes
    return json.dumps({**record, "digest": digest_json(record)}).encode()


class TestChooser:
    """What wins: the call, then the engine's number, then the verdict, then the selector's default."""

    def test_without_a_verdict(self) -> None:
        chooser = PolicyChooser("anchor", "auto")
        assert chooser.info == PolicyInfo("anchor", None, "default")
        policy = chooser.resolve(None, None, True)
        assert (type(policy.selector).__name__, policy.ratio, policy.reuse) == ("AnchorSelector", None, True)

    def test_auto_takes_both_from_the_verdict(self) -> None:
        chooser = PolicyChooser("anchor", "auto")
        chooser.adopt(VERDICT)
        assert chooser.info == PolicyInfo("random", 0.4, "calibrated")
        policy = chooser.resolve(None, None, True)
        assert (type(policy.selector).__name__, policy.ratio, policy.reuse) == ("RandomSelector", 0.4, True)
        assert not chooser.resolve(None, None, False).reuse

    @pytest.mark.parametrize("verdict", [VERDICT, FAILED])
    @pytest.mark.parametrize(
        ("selector", "ratio", "expected"),
        [
            (None, 0.2, ("AnchorSelector", 0.2)),
            (None, 1.0, ("AnchorSelector", 1.0)),
            ("heads", None, ("HeadsSelector", None)),
            ("heads", "auto", ("HeadsSelector", None)),
            (HeadsSelector(3), 0.2, ("HeadsSelector", 0.2)),
        ],
    )
    def test_a_call_overrides_it(
        self, verdict: Verdict, selector: str | TokenSelector | None, ratio: Any, expected: tuple[str, float | None]
    ) -> None:
        chooser = PolicyChooser("anchor", "auto")
        chooser.adopt(verdict)
        policy = chooser.resolve(selector, ratio, True)
        assert (type(policy.selector).__name__, policy.ratio) == expected and policy.reuse

    @pytest.mark.parametrize("ratio", [0.3, None])
    def test_the_engines_ratio_overrides_it(self, ratio: float | None, caplog: pytest.LogCaptureFixture) -> None:
        chooser = PolicyChooser("heads", ratio)
        chooser.adopt(FAILED)
        assert chooser.info == PolicyInfo("heads", ratio, "given") and not caplog.text
        policy = chooser.resolve(None, None, True)
        assert (type(policy.selector).__name__, policy.ratio, policy.reuse) == ("HeadsSelector", ratio, True)
        asked = chooser.resolve(None, "auto", True)
        assert (type(asked.selector).__name__, asked.ratio, asked.reuse) == ("AnchorSelector", 0.5, False)

    def test_a_selector_of_ones_own_never_gives_way(self) -> None:
        mine = HeadsSelector(3)
        chooser = PolicyChooser(mine, "auto")
        chooser.adopt(VERDICT)
        assert chooser.resolve(None, None, True).selector is mine
        assert chooser.info == PolicyInfo("HeadsSelector", None, "given")

    @pytest.mark.parametrize("ratio", [-0.1, 1.1, "automatic"])
    def test_nonsense_is_refused(self, ratio: Any, make_engine: MakeEngine) -> None:
        with pytest.raises(ValueError, match="recompute_ratio must"):
            make_engine(recompute_ratio=ratio)
        with pytest.raises(ValueError, match="recompute_ratio must"):
            make_engine().prefill("the river", recompute_ratio=ratio)

    def test_in_words(self) -> None:
        assert str(PolicyInfo("anchor", None, "default")) == "anchor (default)"
        assert str(PolicyInfo("anchor", 0.1, "calibrated")) == "anchor at 10% (calibrated)"
        assert str(PolicyInfo("anchor", 0.1, "calibrated", True)) == "full prefill (calibrated)"


class TestEngine:
    def test_auto_follows_the_verdict(self, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        first = make_engine(storage=tmp_path)
        first.ingest(texts, progress=False)
        before = first.prefill(prompt_of(texts)).stats
        first.adopt(VERDICT)
        for engine in (first, make_engine(storage=tmp_path)):
            stats = engine.prefill(prompt_of(texts)).stats
            assert 0.39 < stats.recompute_ratio < 0.43 and stats.mode == "blend"
            assert stats.recomputed_tokens > before.recomputed_tokens
            assert str(engine.policy) == "random at 40% (calibrated)"
            assert engine.generate(prompt_of(texts), 2).stats.recompute_ratio == stats.recompute_ratio
            stream = engine.stream(prompt_of(texts), 2)
            list(stream)
            assert stream.stats is not None and stream.stats.recompute_ratio == stats.recompute_ratio

    def test_numbers_override_it(self, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        engine = make_engine(storage=tmp_path)
        engine.ingest(texts, progress=False)
        engine.adopt(VERDICT)
        fixed = make_engine(storage=tmp_path, selector="random", recompute_ratio=0.2)
        for stats in (
            fixed.prefill(prompt_of(texts)).stats,
            engine.prefill(prompt_of(texts), selector="random", recompute_ratio=0.2).stats,
        ):
            assert 0.19 < stats.recompute_ratio < 0.22
        assert engine.prefill(prompt_of(texts), recompute_ratio=1.0).stats.reused_tokens == 0
        assert engine.prefill(prompt_of(texts), selector="none").stats.recomputed_tokens == 0
        assert fixed.policy == PolicyInfo("random", 0.2, "given")

    def test_a_failed_verdict_is_full_prefill(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        plain = make_engine(storage=tmp_path)
        plain.ingest(texts, progress=False)
        save_verdict(plain._store, priming_of("none", 0, 0, True), FAILED)
        engine = make_engine(storage=tmp_path)
        warnings = [r for r in caplog.records if "served by full prefill" in r.message]
        assert len(warnings) == 1 and "KL 0.02" in warnings[0].message and "0.3" in warnings[0].message
        prefill = engine.prefill(prompt_of(texts))
        assert (prefill.stats.mode, prefill.stats.hits) == ("full", 0)
        assert torch.equal(prefill.logits, engine.prefill(prompt_of(texts), reuse=False).logits)
        assert engine.generate(prompt_of(texts), 2).stats.mode == "full"
        engine.refresh()
        assert len([r for r in caplog.records if "served by full prefill" in r.message]) == 1
        assert engine.policy.full_prefill and str(engine.policy) == "full prefill (calibrated)"
        assert engine.prefill(prompt_of(texts), recompute_ratio=0.3).stats.mode == "blend"

    def test_refresh_sees_a_new_verdict(self, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        engine = make_engine(storage=tmp_path)
        engine.ingest(texts, progress=False)
        make_engine(storage=tmp_path).adopt(VERDICT)
        assert engine.policy.source == "default"
        engine.refresh()
        assert engine.policy == PolicyInfo("random", 0.4, "calibrated")
        assert 0.39 < engine.prefill(prompt_of(texts)).stats.recompute_ratio < 0.43

    def test_others_do_not_follow_it(self, make_engine: MakeEngine, tmp_path: Path) -> None:
        make_engine(storage=tmp_path).adopt(VERDICT)
        others: list[dict[str, Any]] = [
            {"namespace": "other"},
            {"prime": "sample"},
            {"model": random_model(seed=1)},
            {"kv_dtype": torch.float16},
            {"codec": "int8"},
            {"codec": "int4"},
        ]
        for other in others:
            assert make_engine(storage=tmp_path, **other).policy.source == "default", other
        for same in ({}, {"codec": "zstd"}):
            assert make_engine(storage=tmp_path, **same).policy.source == "calibrated", same

    def test_a_lossless_verdict_does_not_bless_rounded_caches(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        make_engine(storage=tmp_path).adopt(VERDICT)
        rounded = make_engine(storage=tmp_path, codec="int4")
        rounded.ingest(texts, progress=False)
        assert rounded.policy == PolicyInfo("anchor", None, "default")
        rounded.adopt(FAILED)
        assert rounded.policy.full_prefill and rounded.prefill(prompt_of(texts)).stats.mode == "full"
        assert make_engine(storage=tmp_path, codec="int4").policy.full_prefill
        assert not make_engine(storage=tmp_path).policy.full_prefill

    def test_primed_otherwise_means_a_verdict_of_its_own(self, make_engine: MakeEngine, tmp_path: Path) -> None:
        make_engine(storage=tmp_path, prime="sample", prime_tokens=16).adopt(VERDICT)
        make_engine(storage=tmp_path, prime="sample", prime_tokens=32).adopt(FAILED)
        found = [make_engine(storage=tmp_path, prime="sample", prime_tokens=n).policy for n in (16, 32, 64)]
        assert [policy.source for policy in found] == ["calibrated", "calibrated", "default"]
        assert [policy.full_prefill for policy in found] == [False, True, False]

    def test_a_damaged_record_does_not_break_an_engine(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = make_engine(storage=tmp_path)
        engine.ingest(texts, progress=False)
        engine.adopt(VERDICT)
        name = engine._store.record_name("calibration", priming_of("none", 0, 0, True))
        path = tmp_path / "records" / f"{name}.json"
        path.write_bytes(path.read_bytes()[:-20])
        again = make_engine(storage=tmp_path)
        assert "calibrate again" in caplog.text and again.policy.source == "default"
        assert again.prefill(prompt_of(texts)).stats.mode == "blend"

    def test_anchor_is_the_default(self, make_engine: MakeEngine) -> None:
        assert make_engine().policy == PolicyInfo("anchor", None, "default")
        assert make_engine(selector="heads").policy == PolicyInfo("heads", None, "given")

    def test_a_model_that_cannot_blend_says_so(self, make_engine: MakeEngine) -> None:
        gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, eos_token_id=2))
        engine = make_engine(model=gpt2, on_unsupported="full")
        assert engine.policy.full_prefill and str(engine.policy) == "full prefill (default)"
