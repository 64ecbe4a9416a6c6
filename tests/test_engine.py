"""The engine's contract: what users call, what they get back, and what bad input gets."""

from __future__ import annotations

import gc
import re
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from conftest import random_model, random_text, small_tokenizer
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
)

from rag_blend import BlendEngine, GenerationCancelledError, PromptTooLongError, UnsupportedModelError
from rag_blend.prefiller import ChunkPrefiller, Job, Prefilled
from rag_blend.rows import RowSet

MakeEngine = Callable[..., BlendEngine]
HEAD = "<|im_start|>user\nAnswer the question from the water and light of the valley below.\n"


def prompt_with(*chunks: str, question: str = "\n\nwhich river?<|im_end|>\n") -> str:
    return HEAD + "\n\n".join(chunks) + question


class TestIngest:
    def test_report_and_second_run(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        first = engine.ingest(texts, progress=False)
        assert first.chunks == len(texts) and first.skipped == 0
        assert first.tokens == sum(len(engine.tokenizer(t)["input_ids"]) for t in texts)
        heads, dim, layers, sides, width = 2, 16, 2, 2, 4
        assert first.bytes > first.tokens * heads * dim * layers * sides * width
        second = engine.ingest([*texts, "  " + texts[0] + "\n"], progress=False)
        assert (second.chunks, second.tokens, second.bytes, second.skipped) == (0, 0, 0, len(texts) + 1)

    def test_too_short_and_empty_texts_are_skipped(self, make_engine: MakeEngine) -> None:
        report = make_engine().ingest(["", "  \n", "the river"], progress=False)
        assert (report.chunks, report.skipped) == (0, 3)

    def test_no_texts(self, make_engine: MakeEngine) -> None:
        assert make_engine().ingest([], progress=False).chunks == 0

    def test_a_chunk_longer_than_the_window_is_skipped_with_a_warning(
        self, make_engine: MakeEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        report = make_engine().ingest([random_text(1, 3000)], progress=False)
        assert report.skipped == 1
        assert "context window of 1024" in caplog.text

    def test_doc_ids_must_fit(self, make_engine: MakeEngine, texts: list[str]) -> None:
        with pytest.raises(ValueError, match="6 texts, but 1 doc_ids"):
            make_engine().ingest(texts, doc_ids=["a"], progress=False)

    def test_the_same_chunks_behind_another_head_are_stored_apart(
        self, make_engine: MakeEngine, texts: list[str]
    ) -> None:
        engine = make_engine()
        engine.ingest(texts, head=HEAD, progress=False)
        assert engine.ingest(texts, head="Another head of the valley and the river.\n", progress=False).skipped == 0

    def test_a_batch_equals_single_chunks(self, make_engine: MakeEngine) -> None:
        """Chunks of different lengths prefilled together are not disturbed by padding."""
        chunks = [random_text(seed, words) for seed, words in enumerate([20, 90, 45])]
        primed = random_text(50, 30)
        together, alone = make_engine(prime=primed), make_engine(prime=primed)
        together.ingest(chunks, progress=False)
        for chunk in chunks:
            alone.ingest([chunk], progress=False)
        prompt = prompt_with(*chunks)
        left, right = together.prefill(prompt).logits, alone.prefill(prompt).logits
        assert torch.allclose(left, right, atol=1e-4)

    def test_a_chunk_is_ingested_while_others_query(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts[:3], progress=False)
        with ThreadPoolExecutor(4) as pool:
            writing = pool.submit(engine.ingest, [random_text(s) for s in range(10, 40)], progress=False)
            answers = [pool.submit(engine.generate, prompt_with(*texts[:3]), 4) for _ in range(6)]
            assert len({tuple(a.result().token_ids) for a in answers}) == 1
            assert writing.result().chunks == 30


class TestReuse:
    def test_unknown_text_is_a_full_prefill(self, make_engine: MakeEngine) -> None:
        stats = make_engine().prefill(prompt_with(random_text(1))).stats
        assert (stats.mode, stats.hits, stats.misses, stats.recompute_ratio) == ("full", 0, 0, 0.0)
        assert stats.fresh_tokens == stats.prompt_tokens

    def test_chunks_are_found_in_any_order_and_more_than_once(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts, progress=False)
        stats = engine.prefill(prompt_with(texts[4], texts[0], texts[4], random_text(99), texts[2])).stats
        assert stats.mode == "blend" and stats.hits == 3
        assert stats.reused_tokens + stats.recomputed_tokens > 4 * 55

    def test_chunks_of_another_head_are_misses_unless_allowed(self, make_engine: MakeEngine, texts: list[str]) -> None:
        storage = make_engine()._backend  # shared by both engines
        strict, lax = make_engine(storage=storage), make_engine(storage=storage, any_head=True)
        strict.ingest(texts, head="Another head of the valley and the river and the north.\n", progress=False)
        lax.refresh()
        stats = strict.prefill(prompt_with(*texts[:3])).stats
        assert (stats.mode, stats.hits, stats.misses) == ("full", 0, 3)
        assert lax.prefill(prompt_with(*texts[:3])).stats.hits == 3

    def test_chunks_of_another_head_count_beside_usable_ones(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts[:2], head=HEAD, progress=False)
        engine.ingest(texts[2:4], head="Another head of the valley and the river and the north.\n", progress=False)
        stats = engine.prefill(prompt_with(*texts[:4])).stats
        assert (stats.hits, stats.misses) == (3, 2)

    def test_primed_chunks_are_not_exact(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(prime=random_text(50, 30), exact_first=False, recompute_ratio=0.0)
        engine.ingest(texts[:1], head=HEAD, progress=False)
        stats = engine.prefill(prompt_with(texts[0])).stats
        assert stats.mode == "blend" and stats.prefix_tokens == len(engine.tokenizer(HEAD)["input_ids"])

    def test_another_engine_of_the_same_model_reuses_the_directory(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        make_engine(storage=tmp_path).ingest(texts, head=HEAD, progress=False)
        again = make_engine(storage=tmp_path)
        assert again.num_chunks == len(texts) + 1
        assert again.prefill(prompt_with(*texts[:3])).stats.hits == 4

    @pytest.mark.parametrize(
        "other",
        [
            {"model": "seed"}, {"tokenizer": "bos"}, {"kv_dtype": torch.float16}, {"namespace": "somebody else"},
            {"prime": random_text(50, 30)}, {"family": "qwen2"}, {"rope": "linear"},
        ],
        ids=lambda other: next(iter(other)),
    )  # fmt: skip
    def test_whatever_differs_is_never_reused(
        self, other: dict[str, object], make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        make_engine(storage=tmp_path).ingest(texts, head=HEAD, progress=False)
        options = dict(other)
        if other.get("model"):
            options["model"] = random_model(seed=1)
        if other.get("tokenizer"):
            options["tokenizer"] = small_tokenizer(adds_bos=True)
        engine = make_engine(storage=tmp_path, **options)
        stats = engine.prefill(prompt_with(*texts[:3])).stats
        assert stats.reused_tokens == 0 and stats.hits <= 1  # the head itself does not depend on the priming text

    def test_reuse_false_touches_nothing(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts, progress=False)
        assert engine.prefill(prompt_with(*texts), reuse=False).stats.mode == "full"


class TestForget:
    def test_forgotten_documents_are_gone(self, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        engine = make_engine(storage=tmp_path)
        engine.ingest(texts, doc_ids=["a", "a", "b", "b", "c", "c"], progress=False)
        assert engine.forget(["a", "unknown"]).entries == 2
        assert engine.prefill(prompt_with(*texts[:4])).stats.hits == 2
        assert make_engine(storage=tmp_path).num_chunks == 4
        assert engine.ingest(texts, progress=False).chunks == 2

    def test_a_chunk_that_another_document_needs_stays(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest([texts[0], texts[0]], doc_ids=["a", "b"], progress=False)
        assert engine.forget(["a"]).entries == 0
        assert engine.forget(["b"]).entries == 1

    def test_a_document_in_the_priming_sample_takes_all_primed_chunks_with_it(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        engine = make_engine(storage=tmp_path, prime="sample", prime_tokens=16)
        engine.ingest(texts, doc_ids=[str(i) for i in range(6)], progress=False)
        reports = [engine.forget([str(i)]) for i in range(6)]
        assert any(report.prime_renewed for report in reports)
        assert engine.num_chunks == 0
        assert not list(tmp_path.glob("??/*.safetensors"))
        assert engine.ingest(texts, doc_ids=[str(i) for i in range(6)], progress=False).chunks == 6

    def test_forgetting_the_sample_during_an_ingestion(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """What is written afterwards must not be primed with the forgotten text."""
        monkeypatch.setattr("rag_blend.ingest._BATCH_TOKENS", 1)
        engine = make_engine(storage=tmp_path, prime="sample", prime_tokens=16)
        texts = [random_text(seed) for seed in range(30)]
        reports = []
        prefill = ChunkPrefiller.prefill

        def and_forget(self: ChunkPrefiller, jobs: list[Job]) -> list[Prefilled]:
            if not reports and engine.num_chunks > 3:
                reports.append(engine.forget([str(i) for i in range(30)]))
            return prefill(self, jobs)

        monkeypatch.setattr(ChunkPrefiller, "prefill", and_forget)
        engine.ingest(texts, doc_ids=[str(i) for i in range(30)], progress=False)
        assert reports[0].prime_renewed
        assert engine.num_chunks == 0 and not list(tmp_path.glob("??/*.safetensors"))


class TestTrouble:
    def test_a_damaged_entry_costs_a_recompute_and_is_counted(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        engine = make_engine(storage=tmp_path, recompute_ratio=0.0)
        engine.ingest(texts, progress=False)
        prompt = prompt_with(*texts[:4])
        whole = engine.generate(prompt, 8)
        path = sorted(tmp_path.glob("??/*.safetensors"), key=lambda p: p.stat().st_size)
        hits = whole.stats.hits
        for file in path:
            raw = bytearray(file.read_bytes())
            raw[-1] ^= 1  # in the last layer: noticed when the first has been used already
            file.write_bytes(raw)
        answer = engine.generate(prompt, 8)
        assert answer.stats.misses == hits == engine.counts()["corrupt"]
        assert answer.stats.mode == "full"
        assert answer.token_ids == engine.generate(prompt, 8, reuse=False).token_ids
        engine.ingest(texts, progress=False)
        assert engine.generate(prompt, 8).token_ids == whole.token_ids
        assert engine.generate(prompt, 8).stats.hits == hits

    def test_entries_deleted_behind_our_back(self, make_engine: MakeEngine, texts: list[str], tmp_path: Path) -> None:
        engine = make_engine(storage=tmp_path)
        engine.ingest(texts, progress=False)
        for file in tmp_path.glob("??/*.safetensors"):
            file.unlink()
        stats = engine.prefill(prompt_with(*texts[:4])).stats
        assert stats.mode == "full"

    def test_a_damaged_head_record_is_a_miss_until_the_next_ingestion(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        make_engine(storage=tmp_path).ingest(texts, head=HEAD, progress=False)
        for record in (tmp_path / "records").glob("*.json"):
            record.write_bytes(b"[1, 2")
        engine = make_engine(storage=tmp_path)
        assert engine.prefill(prompt_with(*texts[:3])).stats.reused_tokens == 0
        engine.ingest(texts, head=HEAD, progress=False)
        assert engine.prefill(prompt_with(*texts[:3])).stats.hits == 4

    def test_streaming_survives_a_damaged_entry(
        self, make_engine: MakeEngine, texts: list[str], tmp_path: Path
    ) -> None:
        engine = make_engine(storage=tmp_path)
        engine.ingest(texts, progress=False)
        file = next(tmp_path.glob("??/*.safetensors"))
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
        prompt = prompt_with(*texts)
        streamed = "".join(engine.stream(prompt, 8))
        assert engine.counts()["corrupt"] == 1
        assert streamed == engine.generate(prompt, 8).text

    def test_prompt_too_long(self, make_engine: MakeEngine) -> None:
        with pytest.raises(PromptTooLongError, match=r"the prompt has 1100 tokens, but the context window .* 1024"):
            make_engine().generate([7] * 1100)

    def test_the_answer_ends_with_the_context_window(self, make_engine: MakeEngine) -> None:
        answer = make_engine().generate([7, 8] * 510, max_new_tokens=50, eos_token_id=None)
        assert len(answer.token_ids) == 4

    def test_wrong_types_are_named(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        with pytest.raises(TypeError, match="texts must be a list of strings"):
            engine.ingest("one long text", progress=False)
        with pytest.raises(TypeError, match="texts must be a list of strings"):
            engine.ingest(["a", None], progress=False)  # type: ignore[list-item]
        with pytest.raises(TypeError, match="doc_ids must be a list of strings"):
            engine.ingest(["a", "b"], doc_ids="ab", progress=False)
        with pytest.raises(ValueError, match="token id 600 is outside the vocabulary"):
            engine.generate([5, 600])
        with pytest.raises(ValueError, match="stop string must not be empty"):
            engine.generate("the river", stop=[""])

    @pytest.mark.parametrize("prompt", ["", []])
    def test_nothing_to_answer(self, prompt: str | list[int], make_engine: MakeEngine) -> None:
        with pytest.raises(ValueError, match="no tokens"):
            make_engine().generate(prompt)

    @pytest.mark.parametrize("ratio", [-0.1, 1.1])
    def test_ratio_out_of_range(self, ratio: float, make_engine: MakeEngine) -> None:
        with pytest.raises(ValueError, match="between 0 and 1"):
            make_engine(recompute_ratio=ratio)

    def test_a_call_may_set_another_ratio_than_the_engine(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(recompute_ratio=1.0)
        engine.ingest(texts, progress=False)
        assert engine.prefill(prompt_with(*texts)).stats.recompute_ratio == 1.0
        assert engine.prefill(prompt_with(*texts), recompute_ratio=0.2).stats.recompute_ratio < 0.25
        half = make_engine(recompute_ratio=0.5)
        half.ingest(texts, progress=False)
        assert 0.49 < half.prefill(prompt_with(*texts), selector="random").stats.recompute_ratio < 0.52

    def test_unknown_names(self, make_engine: MakeEngine) -> None:
        with pytest.raises(
            ValueError, match=r"unknown selector 'best'; known: all, anchor, heads, hkvd, none, probe, random"
        ):
            make_engine(selector="best")
        with pytest.raises(ValueError, match="on_unsupported"):
            make_engine(on_unsupported="maybe")
        with pytest.raises(ValueError, match="no storage backend"):
            make_engine(storage="ftp://x")


class TestUnsupported:
    @pytest.fixture
    def gpt2(self) -> GPT2LMHeadModel:
        return GPT2LMHeadModel(GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4, eos_token_id=2))

    def test_learned_positions_are_refused_by_name(self, gpt2: GPT2LMHeadModel, make_engine: MakeEngine) -> None:
        with pytest.raises(
            UnsupportedModelError, match=r"GPT2LMHeadModel \(model_type 'gpt2'\).*on_unsupported='full'"
        ):
            make_engine(model=gpt2)

    def test_or_served_by_full_prefill(self, gpt2: GPT2LMHeadModel, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(model=gpt2, on_unsupported="full")
        assert not engine.can_blend
        assert engine.ingest(texts, progress=False).skipped == len(texts)
        answer = engine.generate(prompt_with(*texts[:2]), 6, do_sample=False)
        ids = engine.tokenizer(prompt_with(*texts[:2]))["input_ids"]
        stock = gpt2.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert answer.token_ids == stock[0, len(ids) :].tolist()
        assert answer.stats.mode == "full"
        assert "".join(engine.stream(prompt_with(*texts[:2]), 6, do_sample=False)) == answer.text
        prefill = engine.prefill(prompt_with(*texts[:2]))
        assert int(prefill.logits.argmax()) == answer.token_ids[0]

    def test_a_family_that_is_driven_differently_is_refused_or_served(self, make_engine: MakeEngine) -> None:
        """DeepSeek's heads end in what is rotated, and its values are smaller than its keys."""
        model = random_model("deepseek_v3", num_key_value_heads=4)
        with pytest.raises(UnsupportedModelError, match=r"DeepseekV3ForCausalLM .* the self-test failed"):
            make_engine(model=model)
        assert make_engine(model=model, on_unsupported="full").generate("the river", 3).stats.mode == "full"

    def test_sliding_windows_are_refused(self, make_engine: MakeEngine) -> None:
        model = MistralForCausalLM(MistralConfig(**_small(), sliding_window=64))
        with pytest.raises(UnsupportedModelError, match="slides over 64 tokens"):
            make_engine(model=model)
        assert make_engine(family="mistral").can_blend

    def test_mixed_layers_are_refused(self, make_engine: MakeEngine) -> None:
        model = random_model("qwen3", use_sliding_window=True, sliding_window=32, max_window_layers=1)
        with pytest.raises(UnsupportedModelError, match="slides over 32 tokens"):
            make_engine(model=model)

    def test_a_model_that_computes_something_else_fails_the_self_test(
        self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(RowSet, "mask", lambda self, window: torch.ones(1, 1, len(self), 40, dtype=torch.bool))
        with pytest.raises(UnsupportedModelError, match="partial recompute differs"):
            make_engine()

    def test_wrong_rotation_fails_the_self_test(self, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rag_blend.rope.Rotary.unrotate", lambda self, keys, angles: keys)
        with pytest.raises(UnsupportedModelError, match="moving the keys of layer 0"):
            make_engine()


class TestGenerationArguments:
    def test_sampling_is_that_of_transformers(self, make_engine: MakeEngine, texts: list[str]) -> None:
        model = random_model()
        engine = make_engine(model=model)
        engine.ingest(texts, progress=False)
        prompt = prompt_with(*texts[:3])
        ids = torch.tensor([engine.tokenizer(prompt)["input_ids"]])
        sampling = {
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.9,
            "repetition_penalty": 1.3,
        }
        torch.manual_seed(3)
        stock = model.generate(ids, max_new_tokens=20, **sampling)[0, ids.shape[1] :].tolist()
        torch.manual_seed(3)
        assert engine.generate(prompt, 20, recompute_ratio=1.0, **sampling).token_ids == stock

    def test_a_checkpoint_that_says_use_cache_false(self, make_engine: MakeEngine, texts: list[str]) -> None:
        """Left behind by gradient checkpointing; plain transformers then computes without a cache, to the same end."""
        model = random_model(use_cache=False)
        engine = make_engine(model=model)
        engine.ingest(texts, progress=False)
        ids = torch.tensor([engine.tokenizer(prompt_with(*texts))["input_ids"]])
        stock = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :].tolist()
        for options in ({"reuse": False}, {"recompute_ratio": 1.0}):
            assert engine.generate(prompt_with(*texts), 12, do_sample=False, **options).token_ids == stock

    def test_generation_config(self, make_engine: MakeEngine) -> None:
        config = GenerationConfig(do_sample=False, eos_token_id=[5], pad_token_id=0)
        answer = make_engine().generate(prompt_with(random_text(1)), 5, generation_config=config)
        assert len(answer.token_ids) == 5

    def test_stop_strings_end_and_cut_the_answer(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        prompt = prompt_with(random_text(1))
        long = engine.generate(prompt, 40, do_sample=False)
        word = max(re.findall("[a-z]+", long.text), key=len)
        cut = engine.generate(prompt, 40, stop=[word, "never there"], do_sample=False)
        assert cut.text == long.text[: long.text.find(word)]
        assert len(cut.token_ids) < len(long.token_ids)

    def test_one_answer_per_call(self, make_engine: MakeEngine) -> None:
        with pytest.raises(ValueError, match="num_return_sequences"):
            make_engine().generate("the river", num_return_sequences=2, do_sample=True)

    @pytest.mark.parametrize(
        "argument", [{"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 8}], ids=str
    )
    def test_what_would_replace_the_blended_cache_is_refused(
        self, argument: dict[str, object], make_engine: MakeEngine
    ) -> None:
        with pytest.raises(ValueError, match="cannot be given"):
            make_engine().generate("the river", **argument)
        with pytest.raises(ValueError, match="cannot be given"):
            make_engine().generate("the river", generation_config=GenerationConfig(**argument))

    def test_length_comes_from_the_argument_else_the_config(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        short = GenerationConfig(max_length=len(engine.tokenizer("the river")["input_ids"]) + 4, pad_token_id=0)
        assert len(engine.generate("the river", generation_config=short).token_ids) == 4
        config = GenerationConfig(max_new_tokens=7, eos_token_id=None, pad_token_id=0)
        assert len(engine.generate("the river", generation_config=config).token_ids) == 7
        assert len(engine.generate("the river", 3, generation_config=config).token_ids) == 3

    def test_assisted_decoding_keeps_the_answer(self, make_engine: MakeEngine, texts: list[str]) -> None:
        """Prompt look-up crops the cache again and again."""
        engine = make_engine()
        engine.ingest(texts, progress=False)
        prompt = prompt_with(*texts[:4])
        plain = engine.generate(prompt, 24, do_sample=False)
        assisted = engine.generate(prompt, 24, do_sample=False, prompt_lookup_num_tokens=3)
        assert assisted.token_ids == plain.token_ids and assisted.stats.mode == "blend"

    def test_times_are_measured(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts, progress=False)
        stats = engine.generate(prompt_with(*texts), 10).stats
        assert 0 < stats.ttft_s < 30 and 0 < stats.load_s < 30

    def test_decoding_continues_the_blended_cache(self, make_engine: MakeEngine, texts: list[str]) -> None:
        """Growing in place equals transformers' own growing: continue greedily by hand from `prefill`."""
        model = random_model()
        engine = make_engine(model=model)
        engine.ingest(texts, progress=False)
        prompt = prompt_with(*texts[:4])
        prefill = engine.prefill(prompt)
        by_hand, token = [], int(prefill.logits.argmax())
        for _ in range(12):
            by_hand.append(token)
            with torch.no_grad():
                arguments = {engine._server._cache_argument: prefill.cache}
                token = int(model(torch.tensor([[token]]), use_cache=True, **arguments).logits[0, -1].argmax())
        assert engine.generate(prompt, 12, do_sample=False, eos_token_id=None).token_ids == by_hand


class TestThreads:
    def test_concurrent_answers_equal_single_ones(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts, progress=False)
        prompts = [prompt_with(texts[i], texts[(i + 1) % 6]) for i in range(6)] * 3
        alone = [engine.generate(p, 6).token_ids for p in prompts]
        with ThreadPoolExecutor(8) as pool:
            together = list(pool.map(lambda p: engine.generate(p, 6).token_ids, prompts))
        assert together == alone

    def test_two_engines_on_one_model(self, make_engine: MakeEngine, texts: list[str]) -> None:
        model = random_model()
        engines = [make_engine(model=model, prime=prime) for prime in ("none", random_text(50, 30))]
        for engine in engines:
            engine.ingest(texts, progress=False)
        expected = [engine.prefill(prompt_with(*texts)).logits for engine in engines]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda i: engines[i % 2].prefill(prompt_with(*texts)).logits, range(80)))
        assert all(torch.equal(result, expected[i % 2]) for i, result in enumerate(results))

    def test_two_models_probe_at_once(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engines = [make_engine(model=random_model(seed=seed), selector="anchor") for seed in (0, 1)]
        prompts = [prompt_with(*texts), prompt_with(*texts[:3])]
        for engine in engines:
            engine.ingest(texts, progress=False)
        expected = [engine.prefill(prompt).logits for engine, prompt in zip(engines, prompts, strict=True)]
        with ThreadPoolExecutor(4) as pool:
            results = list(pool.map(lambda i: engines[i % 2].prefill(prompts[i % 2]).logits, range(80)))
        assert all(torch.equal(result, expected[i % 2]) for i, result in enumerate(results))

    @pytest.mark.parametrize("selector", ["heads", "anchor"])
    def test_a_closed_engine_s_model_is_freed(self, selector: str, make_engine: MakeEngine, texts: list[str]) -> None:
        model = random_model()
        engine = BlendEngine(model, small_tokenizer(), None, selector=selector, prime="none")
        engine.ingest(texts, progress=False)
        engine.prefill(prompt_with(*texts))
        gone = weakref.ref(model)
        engine.close()
        del engine, model
        gc.collect()
        assert gone() is None

    def test_an_engine_can_be_made_while_its_model_is_in_use(self, make_engine: MakeEngine, texts: list[str]) -> None:
        model = random_model()
        engine = make_engine(model=model, selector="anchor")
        engine.ingest(texts, progress=False)
        with ThreadPoolExecutor(3) as pool:
            busy = [pool.submit(engine.generate, prompt_with(*texts), 30, eos_token_id=None) for _ in range(3)]
            for _ in range(5):
                assert make_engine(model=model).can_blend
            assert len({tuple(answer.result().token_ids) for answer in busy}) == 1
        assert model.config._attn_implementation == "sdpa"

    def test_cancelling_in_the_queue_does_not_wait_for_others(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        with engine._lock:  # somebody else is generating
            with ThreadPoolExecutor(1) as pool:
                stream = pool.submit(engine.stream, "the river").result()
                assert not stream._thread.join(0.1)
                pool.submit(stream.close).result(timeout=10)
                assert list(stream) == []

    def test_chunks_can_be_counted_during_ingestion(self, make_engine: MakeEngine) -> None:
        engine = make_engine()
        with ThreadPoolExecutor(1) as pool:
            writing = pool.submit(
                lambda: [engine.ingest([random_text(s)], head=f"Head {s}. " * 8, progress=False) for s in range(20)]
            )
            while not writing.done():
                assert engine.num_chunks >= 0
                time.sleep(0.0005)
            writing.result()
        assert engine.num_chunks == 40

    def test_cancelled_before_and_during_prefill(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine()
        engine.ingest(texts, progress=False)
        cancel = threading.Event()
        cancel.set()
        with pytest.raises(GenerationCancelledError):
            engine.generate(prompt_with(*texts), cancel=cancel)
        assert engine.generate(prompt_with(*texts), 3).stats.hits == 6

    def test_hooks_leave_the_model_as_it_was(self, make_engine: MakeEngine, texts: list[str]) -> None:
        model = random_model()
        engine = make_engine(model=model)
        engine.ingest(texts, progress=False)
        engine.generate(prompt_with(*texts), 3)
        assert not any(layer._forward_pre_hooks for layer in model.model.layers)


class TestPrompts:
    def test_bos_is_there_once(self, make_engine: MakeEngine) -> None:
        engine = make_engine(tokenizer=small_tokenizer(adds_bos=True))
        plain = engine.prefill("the river and the bridge").stats.prompt_tokens
        assert engine.prefill("<s>the river and the bridge").stats.prompt_tokens == plain
        assert engine.prefill("the river and the bridge", add_special_tokens=False).stats.prompt_tokens == plain - 1

    def test_a_text_head_fits_text_prompts_also_with_bos(self, make_engine: MakeEngine, texts: list[str]) -> None:
        engine = make_engine(tokenizer=small_tokenizer(adds_bos=True))
        engine.ingest(texts, head=HEAD, progress=False)
        stats = engine.prefill(prompt_with(*texts[:3])).stats
        assert stats.hits == 4 and stats.fresh_tokens < 30
        assert stats.prefix_tokens > len(engine.tokenizer(HEAD)["input_ids"])  # head and first chunk

    def test_token_ids_are_taken_as_they_are(self, make_engine: MakeEngine) -> None:
        assert make_engine().prefill([7, 8, 9]).stats.prompt_tokens == 3


class TestFromPretrained:
    def test_a_local_directory(self, tmp_path: Path, texts: list[str]) -> None:
        random_model().save_pretrained(tmp_path / "model")
        small_tokenizer().save_pretrained(tmp_path / "model")
        with BlendEngine.from_pretrained(tmp_path / "model", storage=tmp_path / "kv") as engine:
            assert engine.ingest(texts, progress=False).chunks == 6
            assert engine.prefill(prompt_with(*texts[:2])).stats.hits == 2
            assert engine.context_window == 1024
            assert engine.model_name == str(tmp_path / "model")
        # The same weights elsewhere are the same model.
        random_model().save_pretrained(tmp_path / "copy")
        small_tokenizer().save_pretrained(tmp_path / "copy")
        with BlendEngine.from_pretrained(tmp_path / "copy", storage=tmp_path / "kv") as engine:
            assert engine.ingest(texts, progress=False).skipped == 6

    def test_no_such_model(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="there is no model directory"):
            BlendEngine.from_pretrained(str(tmp_path / "nothing"))


def _small() -> dict[str, int]:
    return {
        "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    }  # fmt: skip
