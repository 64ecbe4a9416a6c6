"""Repeated prompts and chat turns: what was prefilled exactly is reused exactly, and nothing else is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FAMILIES, ROPES, random_model, small_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, PreTrainedModel

from rag_blend import BlendEngine, GenerationStats, TokenSelector
from rag_blend.chunk import LayerKV
from rag_blend.evaluation.calibrate import calibrate
from rag_blend.plan import BlendPlan, Positions
from rag_blend.prefixes import NOTHING, Prefix, PrefixCache
from rag_blend.teacher import forced_logits
from rag_blend.trace import Kind

MakeEngine = Callable[..., BlendEngine]
HEAD = "<|im_start|>user\nAnswer the question from the water and light of the valley below.\n"
QUESTION = "\n\nwhich river under the bridge?<|im_end|>\n"
MEMORY = 2**24
LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 64, "rope_theta": 10000.0, "factor": 4.0,
}  # fmt: skip


class _Slotted(TokenSelector):
    __slots__ = ()

    def select(self, plan: BlendPlan, ratio: float | None) -> Positions:
        return plan.reusable[:4]


def random_ids(seed: int, num_tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(5, 500, (num_tokens,), generator=generator).tolist()
    return ids


def full_logits(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0, -1]
    return logits


def assert_full(engine: BlendEngine, ids: list[int], prefix_tokens: int | None = None) -> GenerationStats:
    """A prompt's logits equal the model's own; returns its stats."""
    prefill = engine.prefill(ids)
    expected = full_logits(engine._model, ids)
    assert float((prefill.logits - expected).abs().max() / expected.abs().max()) <= 1e-4
    if prefix_tokens is not None:
        assert prefill.stats.prefix_tokens == prefix_tokens
        assert prefill.stats.fresh_tokens == len(ids) - prefix_tokens
        assert prefill.stats.mode == ("prefix" if prefix_tokens else "full")
    return prefill.stats


@pytest.fixture
def engine(make_engine: MakeEngine) -> BlendEngine:
    return make_engine(prefix_cache_bytes=MEMORY)


class TestWhatIsReused:
    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("rope", ROPES)
    def test_the_same_prompt_and_the_next_turn(self, family: str, rope: str, make_engine: MakeEngine) -> None:
        engine = make_engine(family, rope, prefix_cache_bytes=MEMORY)
        first = random_ids(1, 90)
        answer = engine.generate(first, 12, do_sample=False)
        assert answer.stats.mode == "full"
        assert_full(engine, first, len(first) - 1)
        held = len(first) + len(answer.token_ids) - 1  # nobody has computed the last token's row
        turn = first + answer.token_ids + random_ids(2, 30)
        assert_full(engine, turn, held)
        assert_full(engine, turn + random_ids(3, 5), len(turn))

    def test_answers_are_those_of_a_full_prefill(self, make_engine: MakeEngine) -> None:
        kept, plain = make_engine(prefix_cache_bytes=MEMORY), make_engine()
        ids = random_ids(1, 80)
        for _ in range(3):
            answers = [engine.generate(ids, 10, do_sample=False).token_ids for engine in (kept, plain)]
            assert answers[0] == answers[1]
            ids = ids + answers[0] + random_ids(len(ids), 7)

    def test_only_what_is_new_is_computed(self, engine: BlendEngine) -> None:
        rows = []
        layer = engine._model.get_decoder().layers[0]
        layer.mlp.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
        ids = random_ids(1, 200)
        engine.prefill(ids)
        engine.prefill(ids)
        engine.prefill(ids[:120] + random_ids(2, 20))
        assert rows == [200, 1, 20]

    def test_the_keys_and_values_are_the_same_bits(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model=random_model().to(torch.bfloat16), kv_dtype=None, prefix_cache_bytes=MEMORY)
        ids = random_ids(1, 60)
        first, second = engine.prefill(ids).cache, engine.prefill([*ids, 7]).cache
        for left, right in zip(first.layers, second.layers, strict=True):
            assert left.keys.dtype == right.keys.dtype == torch.bfloat16
            assert torch.equal(left.keys, right.keys[..., :60, :])
            assert torch.equal(left.values, right.values[..., :60, :])

    def test_the_longest_common_beginning_counts(self, engine: BlendEngine) -> None:
        ids = random_ids(1, 100)
        for length in (30, 70, 50):
            engine.prefill(ids[:length] + random_ids(length, 20))
        assert_full(engine, ids, 70)

    @pytest.mark.parametrize(("shared", "reused"), [(15, 0), (16, 16)])
    def test_few_tokens_are_not_worth_it(self, shared: int, reused: int, engine: BlendEngine) -> None:
        ids = random_ids(1, 40)
        engine.prefill(ids)
        other = [*ids[:shared], ids[shared] + 1, *random_ids(2, 20)]
        assert_full(engine, other, reused)

    def test_the_last_token_is_always_computed(self, engine: BlendEngine) -> None:
        ids = random_ids(1, 40)
        engine.prefill(ids)
        assert_full(engine, ids[:17], 16)
        assert_full(engine, ids[:16], 0)

    @settings(max_examples=40)
    @given(prompts=st.lists(st.lists(st.sampled_from([5, 6]), min_size=1, max_size=60), min_size=2, max_size=8))
    def test_any_sequence_of_prompts(self, prompts: list[list[int]]) -> None:
        """Two letters, and little memory: prompts share beginnings of all lengths, and some are dropped."""
        common = [5, 6] * 10
        with BlendEngine(MODEL, TOKENIZER, None, prime="none", prefix_cache_bytes=60_000) as engine:
            for prompt in prompts:
                for ids in (prompt, common + prompt):
                    assert_full(engine, ids)
                    assert engine._prefixes.num_bytes <= 60_000


MODEL, TOKENIZER = random_model(), small_tokenizer()


class TestFrequencies:
    """With dynamic and long RoPE, rows may belong to prompts of one length only."""

    def test_long_rope(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model=random_model(rope_parameters=LONGROPE), prefix_cache_bytes=MEMORY)
        ids = random_ids(1, 100)
        assert_full(engine, ids[:50], 0)
        assert_full(engine, ids[:60], 50)
        assert_full(engine, ids[:80], 0)  # beyond 64 tokens, all frequencies change
        assert_full(engine, ids[:100], 80)
        assert_full(engine, ids[:62], 60)

    def test_dynamic_rope_beyond_its_window(self, make_engine: MakeEngine) -> None:
        engine = make_engine(model=random_model(rope="dynamic"), prefix_cache_bytes=MEMORY)
        engine._model.get_decoder().rotary_emb.original_max_seq_len = 64
        engine._model.get_decoder().rotary_emb.max_seq_len_cached = 64
        engine._model.config.max_position_embeddings = 64  # of the frequencies; the engine has read its window before
        ids = random_ids(1, 100)
        assert_full(engine, ids[:50], 0)
        assert_full(engine, ids[:60], 50)
        assert_full(engine, ids[:80], 0)
        assert_full(engine, ids[:90], 0)
        assert_full(engine, ids[:90], 89)

    @pytest.mark.parametrize("changes", [{"rope_parameters": LONGROPE}, {"rope": "dynamic"}])
    def test_an_answer_that_changes_them_is_not_kept(self, changes: dict[str, Any], make_engine: MakeEngine) -> None:
        engine = make_engine(model=random_model(**changes), prefix_cache_bytes=MEMORY)
        if "rope" in changes:
            engine._model.get_decoder().rotary_emb.max_seq_len_cached = 64
            engine._model.get_decoder().rotary_emb.original_max_seq_len = 64
            engine._model.config.max_position_embeddings = 64
        answer = engine.generate(random_ids(1, 55), 30, min_new_tokens=30, do_sample=False)
        assert len(answer.token_ids) == 30
        assert len(engine._prefixes) == 0


class TestWithStoredChunks:
    def test_a_blended_prompt_is_never_passed_off_as_exact(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(prefix_cache_bytes=MEMORY, recompute_ratio=0.05)
        engine.ingest(texts, head=HEAD, progress=False)
        prompt = HEAD + "\n\n".join(texts[1:4]) + QUESTION
        first = engine.generate(prompt, 5)
        again = engine.generate(prompt, 5)
        assert first.token_ids == again.token_ids
        assert again.stats.mode == "blend" and again.stats.prefix_tokens == 0
        assert (again.stats.reused_tokens, again.stats.fresh_tokens) == (again.stats.prompt_tokens - 1, 1)
        assert set(again.trace.kinds[:-1]) == {Kind.REUSED}

    def test_the_next_turn_goes_on_from_a_blend(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(prefix_cache_bytes=MEMORY, recompute_ratio=0.05)
        engine.ingest(texts, head=HEAD, progress=False)
        ids = engine.tokenizer(HEAD + "\n\n".join(texts[1:4]) + QUESTION)["input_ids"]
        answer = engine.generate(ids, 8, do_sample=False)
        longer = [*ids, *answer.token_ids, *random_ids(3, 9), *engine.tokenizer(texts[4] + QUESTION)["input_ids"]]
        stats = engine.generate(longer, 3).stats
        assert stats.mode == "blend" and stats.prefix_tokens == 0 and stats.hits == 1  # the new chunk
        assert stats.reused_tokens + stats.recomputed_tokens > len(ids) + 20
        assert sum(prefix.recipe is not None for prefix in engine._prefixes._kept) == 1  # the longer one has it in it

    @pytest.mark.parametrize("change", ["question", "ratio", "selector", "exact"])
    def test_a_blend_serves_only_whole_and_under_its_own_recipe(
        self, change: str, make_engine: MakeEngine, texts: list[str]
    ) -> None:
        engine, plain = (make_engine(prefix_cache_bytes=memory, recompute_ratio=0.05) for memory in (MEMORY, 0))
        for each in (engine, plain):
            each.ingest(texts, head=HEAD, progress=False)
        prompt = HEAD + "\n\n".join(texts[1:4]) + QUESTION
        engine.generate(prompt, 5)
        changes = {"ratio": {"recompute_ratio": 0.3}, "selector": {"selector": "heads"}, "exact": {"reuse": False}}
        asked = prompt.removesuffix(QUESTION) + "\nAnd that one?\n" if change == "question" else prompt
        ours, theirs = (each.prefill(asked, **changes.get(change, {})) for each in (engine, plain))
        assert torch.equal(ours.logits, theirs.logits)
        assert ours.stats.prefix_tokens == theirs.stats.prefix_tokens

    def test_a_selector_of_ones_own_is_its_own_recipe(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(prefix_cache_bytes=MEMORY, selector=_Slotted(), recompute_ratio=0.05)
        engine.ingest(texts, head=HEAD, progress=False)
        prompt = HEAD + "\n\n".join(texts[1:4]) + QUESTION
        engine.generate(prompt, 5)
        assert engine.generate(prompt, 5).stats.fresh_tokens == 1
        assert engine.generate(prompt, 5, selector=_Slotted()).stats.fresh_tokens > 1

    def test_blends_of_batches_and_bare_prefills_are_not_kept(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(prefix_cache_bytes=MEMORY, recompute_ratio=0.05)
        engine.ingest(texts, head=HEAD, progress=False)
        prompts = [HEAD + "\n\n".join(texts[i : i + 3]) + QUESTION for i in range(3)]
        engine.prefill(prompts[0])
        engine.generate_batch(prompts, 5)
        assert len(engine._prefixes) == 0

    def test_a_longer_prefix_takes_the_place_of_stored_chunks(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(prefix_cache_bytes=MEMORY, recompute_ratio=0.0)
        exact = HEAD + texts[0] + QUESTION
        engine.prefill(exact)  # before anything is stored
        engine.ingest(texts, head=HEAD, progress=False)
        stats = engine.prefill(exact + "\n\n" + texts[1]).stats
        in_front = len(engine.tokenizer(exact)["input_ids"])
        assert stats.mode == "blend" and stats.hits == 1
        assert stats.prefix_tokens >= in_front - 1 and stats.reused_tokens > 50

    def test_what_follows_a_prefix_may_be_exact_too(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(prefix_cache_bytes=MEMORY, recompute_ratio=0.0)
        engine.prefill(HEAD + QUESTION)
        engine.ingest(texts, head=HEAD, progress=False)
        ids = engine.tokenizer(HEAD + texts[0] + QUESTION)["input_ids"]
        stats = assert_full(engine, ids)
        assert stats.mode == "prefix" and stats.hits >= 1
        assert stats.prefix_tokens > len(engine.tokenizer(texts[0])["input_ids"])
        assert_full(engine, ids, len(ids) - 1)

    def test_a_blend_behind_a_prefix(self, make_engine: MakeEngine, texts: list[str]) -> None:
        """Kept rows are as good as computed ones. (A probe sees them, but not those that are yet to be computed.)"""
        kept, plain = make_engine(prefix_cache_bytes=MEMORY), make_engine()
        kept.prefill(HEAD + texts[5])
        for engine in (kept, plain):
            engine.ingest(texts[:4], progress=False)
        prompt = HEAD + texts[5] + "\n\n" + "\n\n".join(texts[:3]) + QUESTION
        for selector in ("heads", "hkvd", "probe", "anchor", "random", "none"):
            fewer, all_fresh = (engine.prefill(prompt, selector=selector) for engine in (kept, plain))
            assert fewer.stats.mode == "blend" and fewer.stats.hits == 3
            assert fewer.stats.prefix_tokens > 60 and all_fresh.stats.prefix_tokens == 0
            assert fewer.stats.reused_tokens == all_fresh.stats.reused_tokens
            if selector not in ("probe", "anchor"):
                assert torch.allclose(fewer.logits, all_fresh.logits, atol=1e-4)

    def test_checks_neither_use_nor_keep(self, engine: BlendEngine, texts: list[str]) -> None:
        engine.ingest(texts, head=HEAD, progress=False)
        ids = engine.tokenizer(HEAD + texts[1] + QUESTION)["input_ids"]
        checks: list[dict[str, Any]] = [{"reuse": False}, {"recompute_ratio": 1.0}, {"selector": "all"}]
        for check in checks:
            engine.prefill(ids, **check)
            engine.generate(ids, 3, **check)
        assert len(engine._prefixes) == 0
        unknown = random_ids(1, 50)
        engine.prefill(unknown)
        for check in checks:
            assert engine.prefill(unknown, **check).stats.prefix_tokens == 0

    def test_the_shadow_check_sees_the_prompt_anew(
        self, make_engine: MakeEngine, texts: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = make_engine(prefix_cache_bytes=MEMORY, shadow=1.0, recompute_ratio=0.0)
        engine.prefill(HEAD + texts[5])
        engine.ingest(texts[:4], progress=False)
        lookups, usual = [], engine._prefixes.find
        monkeypatch.setattr(engine._prefixes, "find", lambda *prompt: lookups.append(1) or usual(*prompt))
        answer = engine.generate(HEAD + texts[5] + "\n\n" + texts[0] + QUESTION, 4)
        assert answer.stats.mode == "blend" and answer.stats.prefix_tokens > 60
        thread = engine._shadow._thread
        if thread is not None:
            thread.join()
        report = engine.drift()
        assert report.num_checked == 1 and report.mean_kl > 0.0
        assert len(engine._prefixes) == 2 and len(lookups) == 1  # the prefill's and the answer's


class TestWhatIsKept:
    def test_nothing_if_switched_off(self, make_engine: MakeEngine) -> None:
        engine = make_engine(prefix_cache_bytes=0)
        ids = random_ids(1, 40)
        engine.generate(ids, 3)
        assert_full(engine, ids, 0)
        assert engine._prefixes.num_bytes == 0

    def test_it_is_on_by_default(self) -> None:
        with BlendEngine(MODEL, TOKENIZER, None, prime="none") as engine:
            ids = random_ids(1, 40)
            engine.prefill(ids)
            assert_full(engine, ids, 39)

    def test_a_negative_bound_is_refused(self, make_engine: MakeEngine) -> None:
        with pytest.raises(ValueError, match="prefix_cache_bytes"):
            make_engine(prefix_cache_bytes=-1)

    @pytest.mark.parametrize("act", ["forget", "refresh", "close"])
    def test_forgetting_clears_it(self, act: str, engine: BlendEngine) -> None:
        ids = random_ids(1, 40)
        engine.prefill(ids)
        assert engine._prefixes.num_bytes > 0
        {"forget": lambda: engine.forget(["unknown"]), "refresh": engine.refresh, "close": engine.close}[act]()
        assert len(engine._prefixes) == 0
        if act != "close":
            assert_full(engine, ids, 0)

    def test_it_is_cleared_even_if_the_storage_refuses(
        self, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError("read-only")

        engine.prefill(random_ids(1, 40))
        monkeypatch.setattr(engine._store, "forget", refuse)
        with pytest.raises(OSError, match="read-only"):
            engine.forget(["a"])
        assert len(engine._prefixes) == 0

    def test_engines_do_not_share(self, make_engine: MakeEngine) -> None:
        model = random_model()
        first, second = (make_engine(model=model, namespace=name, prefix_cache_bytes=MEMORY) for name in "ab")
        ids = random_ids(1, 40)
        first.prefill(ids)
        assert_full(second, ids, 0)

    def test_a_cache_that_its_owner_changes(self, engine: BlendEngine) -> None:
        ids = random_ids(1, 40)
        for more in ([], random_ids(2, 9)):
            for _ in range(2):  # computed, and reused
                prefill = engine.prefill(ids)
                forced_logits(engine._model, prefill, [5, *more])
                for layer in prefill.cache.layers:
                    layer.keys.fill_(7.0)
                    layer.values.fill_(7.0)
                assert_full(engine, [*ids, 9], 40)
            engine.refresh()

    def test_beams_are_not_kept_but_may_reuse(self, engine: BlendEngine) -> None:
        ids = random_ids(1, 60)
        stock = engine._model.generate(torch.tensor([ids]), max_new_tokens=8, num_beams=3, do_sample=False)
        assert engine.generate(ids, 8, num_beams=3, do_sample=False).token_ids == stock[0, 60:].tolist()
        assert len(engine._prefixes) == 0
        engine.prefill(ids)
        again = engine.generate(ids, 8, num_beams=3, do_sample=False)
        assert again.stats.prefix_tokens == 59
        assert again.token_ids == stock[0, 60:].tolist()

    def test_assisted_decoding(self, engine: BlendEngine) -> None:
        """Whatever it leaves behind is right or not kept."""
        ids = random_ids(1, 20) * 4
        plain = engine._model.generate(torch.tensor([ids]), max_new_tokens=20, do_sample=False)[0].tolist()
        for _ in range(2):
            answer = engine.generate(ids, 20, do_sample=False, prompt_lookup_num_tokens=3)
            assert ids + answer.token_ids == plain
            assert_full(engine, ids + answer.token_ids + random_ids(2, 4))

    def test_sampling_is_kept(self, engine: BlendEngine) -> None:
        ids = random_ids(1, 40)
        answer = engine.generate(ids, 12, min_new_tokens=12, do_sample=True, temperature=1.5, top_k=50)
        assert_full(engine, ids + answer.token_ids + [9], 40 + 11)

    @pytest.mark.parametrize("custom", [{"position_ids": torch.arange(5, 45)[None]}, {"custom_generate": "own"}])
    def test_calls_that_change_the_forward_stay_apart(
        self, custom: dict[str, Any], engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def generate(inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            engine._model(inputs, **{engine._server._cache_argument: kwargs[engine._server._cache_argument]})
            return torch.cat([inputs, inputs[:, :1]], dim=1)

        monkeypatch.setattr(engine._model, "generate", generate)
        ids = random_ids(1, 40)
        engine.generate(ids, 1, **custom)
        assert len(engine._prefixes) == 0
        engine.generate(ids, 1)
        assert len(engine._prefixes) == 1

    @pytest.mark.parametrize(("unseen", "kept"), [(-1, 0), (0, 1), (1, 1), (2, 0)])
    def test_a_cache_of_another_length_is_not_kept(
        self, unseen: int, kept: int, engine: BlendEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def generate(inputs: torch.Tensor, **kwargs: Any) -> torch.Tensor:
            engine._model(inputs, **{engine._server._cache_argument: kwargs[engine._server._cache_argument]})
            return torch.cat([inputs, inputs[:, :unseen]], dim=1) if unseen >= 0 else inputs[:, :unseen]

        monkeypatch.setattr(engine._model, "generate", generate)
        engine.generate(random_ids(1, 40), 1)
        assert len(engine._prefixes) == kept

    def test_an_answer_that_ends_at_a_stop_string(self, engine: BlendEngine) -> None:
        ids = random_ids(1, 40)
        answer = engine.generate(ids, 30, stop=["e", "a", "i"], do_sample=True)
        assert_full(engine, ids + answer.token_ids + [9], 40 + len(answer.token_ids) - 1)

    def test_a_stream_that_is_closed_early(self, engine: BlendEngine) -> None:
        ids, seen = random_ids(1, 60), []

        class Watch(LogitsProcessor):
            def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
                seen.append(input_ids[0].tolist())
                return scores

        stream = engine.stream(ids, 500, min_new_tokens=500, do_sample=True, logits_processor=[Watch()])
        next(stream)
        stream.close()
        assert stream.result is None
        assert 60 < len(seen[-1]) < 560
        held = len(seen[-1])  # of the last token that was chosen, there is no row
        assert_full(engine, [*seen[-1], 9, 8], held)

    def test_a_call_that_fails_keeps_nothing(self, engine: BlendEngine) -> None:
        class Fails(LogitsProcessor):
            def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.FloatTensor:
                raise RuntimeError("in the middle")

        with pytest.raises(RuntimeError, match="in the middle"):
            engine.generate(random_ids(1, 40), 5, logits_processor=[Fails()])
        assert len(engine._prefixes) == 0

    def test_several_threads(self, engine: BlendEngine) -> None:
        base = random_ids(1, 50)
        prompts = [base[: 20 + 5 * i] + random_ids(i, 20) for i in range(6)]
        expected = [full_logits(engine._model, ids) for ids in prompts]
        forgetting = threading.Event()

        def forget() -> None:
            while not forgetting.wait(0.01):
                engine.forget(["unknown"])

        with ThreadPoolExecutor(4) as pool:
            cleaner = pool.submit(forget)
            runs = [(i, pool.submit(engine.prefill, prompts[i])) for _ in range(8) for i in range(6)]
            for i, run in runs:
                assert torch.allclose(run.result().logits, expected[i], atol=1e-3)
            forgetting.set()
            cleaner.result()


def prefix(token_ids: list[int], fill: float = 0.0, frequencies: float = 1.0) -> Prefix:
    rows = torch.full((2, len(token_ids), 4), fill)
    return Prefix(np.asarray(token_ids, dtype=np.int32), [LayerKV(rows, rows + 1)] * 2, torch.tensor([frequencies]))


PER_TOKEN = 2 * 2 * 2 * 4 * 4  # layers, sides, heads, head_dim, float32
ONE = torch.tensor([1.0])


def lookup(cache: PrefixCache, token_ids: list[int]) -> int:
    return len(cache.find(np.asarray([*token_ids, -1], dtype=np.int32), ONE))


class TestPrefixCache:
    def test_the_one_used_longest_ago_is_dropped(self) -> None:
        cache = PrefixCache(3 * 20 * PER_TOKEN)
        one, two, three, four = ([i] * 20 for i in range(4))
        for ids in (one, two, three):
            cache.keep(prefix(ids))
        assert cache.num_bytes == 3 * 20 * PER_TOKEN
        assert lookup(cache, one) == 20
        cache.keep(prefix(four))
        assert [lookup(cache, ids) for ids in (one, two, three, four)] == [20, 0, 20, 20]
        cache.keep(prefix(one[:18]))  # known, so nothing is dropped; but it is the last one used now
        cache.keep(prefix(two * 2))
        assert [lookup(cache, ids) for ids in (one, two * 2, three, four)] == [20, 40, 0, 0]
        assert cache.num_bytes == 3 * 20 * PER_TOKEN

    def test_a_longer_one_replaces_its_beginnings(self) -> None:
        cache = PrefixCache(10**6)
        ids = list(range(60))
        for kept in (ids[:20], ids[:30], [*ids[:25], 99], ids):
            cache.keep(prefix(kept))
        assert sorted(len(kept) for kept in cache._kept) == [26, 60]
        cache.keep(prefix(ids[:40]))
        assert len(cache) == 2

    def test_what_does_not_fit_is_cut(self) -> None:
        cache = PrefixCache(30 * PER_TOKEN + 5)
        ids = list(range(60))
        cache.keep(prefix(ids))
        cache.keep(prefix(ids))
        assert len(cache) == 1 and cache.num_bytes == 30 * PER_TOKEN
        assert lookup(cache, ids) == 30
        small = PrefixCache(15 * PER_TOKEN)
        small.keep(prefix(ids))
        assert len(small) == 0

    def test_other_frequencies_are_other_prompts(self) -> None:
        cache = PrefixCache(10**6)
        ids = list(range(40))
        cache.keep(prefix(ids, fill=1.0, frequencies=1.0))
        cache.keep(prefix(ids, fill=2.0, frequencies=2.0))
        found = cache.find(np.arange(41, dtype=np.int32), ONE)
        assert len(cache) == 2 and len(found) == 40
        assert float(found.layers[0].keys.max()) == 1.0
        assert cache.find(np.arange(41, dtype=np.int32), torch.tensor([3.0])) is NOTHING

    def test_it_has_copies(self) -> None:
        cache = PrefixCache(10**6)
        given = prefix(list(range(40)), fill=1.0)
        cache.keep(given)
        given.layers[0].keys.fill_(9.0)
        given.token_ids[:] = 0
        found = cache.find(np.arange(41, dtype=np.int32), ONE)
        assert len(found) == 40 and float(found.layers[0].keys.max()) == 1.0


def test_measurements_compute_every_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates are compared on the same prompts: none may find them as another one left them."""
    made: list[int] = []
    usual = PrefixCache.__init__

    def watched(self: PrefixCache, max_bytes: int) -> None:
        made.append(max_bytes)
        usual(self, max_bytes)

    monkeypatch.setattr(PrefixCache, "__init__", watched)
    with pytest.raises(ValueError, match="no case"):
        calibrate(MODEL, TOKENIZER, [], None, prime="none", progress=False)
    assert made and set(made) == {0}
