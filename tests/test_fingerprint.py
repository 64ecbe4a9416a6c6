from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import FAMILIES, ROPES, random_model, small_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from rag_blend.chunk import ModelFingerprint
from rag_blend.fingerprint import fingerprint_of


def fingerprint(
    model: PreTrainedModel, tokenizer: Any = None, kv_dtype: torch.dtype = torch.float16
) -> ModelFingerprint:
    return fingerprint_of(model, tokenizer or small_tokenizer(), kv_dtype)


def differing(left: ModelFingerprint, right: ModelFingerprint) -> set[str]:
    fields = ModelFingerprint.__dataclass_fields__
    return {name for name in fields if getattr(left, name) != getattr(right, name)}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_and_loaded_model_is_the_same(family: str, tied: bool, tmp_path: Path) -> None:
    model, tokenizer = random_model(family, tie_word_embeddings=tied), small_tokenizer(adds_bos=True)
    # For some families AutoTokenizer builds a tokenizer of its own, which splits text differently: begin with that one.
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    first = fingerprint(model, tokenizer)
    for place in ("here", "there/under another name"):
        model.save_pretrained(tmp_path / place)
        tokenizer.save_pretrained(tmp_path / place)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / place)
        tokenizer = AutoTokenizer.from_pretrained(tmp_path / place)
        assert differing(first, fingerprint(model, tokenizer)) == set()
        assert fingerprint(model, tokenizer).digest == first.digest


@pytest.mark.parametrize("rope", ROPES)
def test_rope_survives_save_and_load(rope: str, tmp_path: Path) -> None:
    model = random_model(rope=rope)
    first = fingerprint(model)
    model.save_pretrained(tmp_path)
    assert differing(first, fingerprint(AutoModelForCausalLM.from_pretrained(tmp_path))) == set()


def test_rope_types_differ() -> None:
    assert len({fingerprint(random_model(rope=rope)).config for rope in ROPES}) == len(ROPES)


@pytest.mark.parametrize("name", ["rope_theta", "factor", "original_max_position_embeddings"])
def test_one_rope_parameter_changes_it(name: str) -> None:
    parameters = dict(ROPES["yarn"] or {})
    first = fingerprint(random_model(rope="yarn"))
    parameters[name] *= 2
    assert differing(first, fingerprint(random_model(rope_parameters=parameters))) == {"config"}


@pytest.mark.parametrize("change", [{"max_position_embeddings": 2048}, {"rms_norm_eps": 1e-5}, {"hidden_act": "gelu"}])
def test_the_configuration_changes_it(change: dict[str, Any]) -> None:
    assert differing(fingerprint(random_model()), fingerprint(random_model(**change))) == {"config"}


def test_any_single_weight_changes_it() -> None:
    model = random_model("qwen2")
    first = fingerprint(model)
    names = [name for name, _ in model.named_parameters()]
    assert any("bias" in name for name in names) and any("norm" in name for name in names)
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        old = flat[-1].clone()
        flat[-1] = torch.nextafter(old, torch.tensor(torch.inf))  # the last bit of the last element
        assert differing(first, fingerprint(model)) == {"weights"}, name
        flat[-1] = old
    assert fingerprint(model) == first


def test_weights_kept_in_buffers_count() -> None:
    """As those of quantised models are."""
    model = random_model()
    model.model.layers[0].register_buffer("qweight", torch.arange(8))
    first = fingerprint(model)
    model.model.layers[0].qweight[3] = 0
    assert differing(first, fingerprint(model)) == {"weights"}


def test_buffers_that_are_not_saved_do_not_count() -> None:
    model = random_model(rope="dynamic")
    first = fingerprint(model)
    with torch.no_grad():
        model(torch.arange(200)[None] % 500)  # dynamic RoPE changes its frequencies meanwhile
        model(torch.arange(1020)[None] % 500)
    model.model.register_buffer("scratch", torch.zeros(2), persistent=False)
    assert fingerprint(model) == first


def test_weights_that_trade_places_change_it() -> None:
    model = random_model()
    first = fingerprint(model)
    projections = model.model.layers[0].self_attn
    projections.k_proj, projections.v_proj = projections.v_proj, projections.k_proj
    assert differing(first, fingerprint(model)) == {"weights"}


def test_dtypes_change_it() -> None:
    model = random_model()
    first = fingerprint(model)
    assert differing(first, fingerprint(model, kv_dtype=torch.bfloat16)) == {"kv_dtype"}
    assert differing(first, fingerprint(copy.deepcopy(model).bfloat16())) == {"compute_dtype", "weights"}


def test_names_and_settings_of_a_run_do_not_change_it() -> None:
    model = random_model()
    first = fingerprint(model)
    other = copy.deepcopy(model)
    other.config._name_or_path = other.name_or_path = "/another/place"
    other.config.use_cache = False
    other.config.pad_token_id = 7
    other.set_attn_implementation("eager")
    other.generation_config.max_new_tokens = 5
    other.requires_grad_(False)
    assert differing(first, fingerprint(other)) == set()


def test_the_tokenizer_changes_it() -> None:
    model = random_model()
    first = fingerprint(model)
    with_token = small_tokenizer()
    with_token.add_tokens(["<new>"])
    with_bos = small_tokenizer(adds_bos=True)
    lower = small_tokenizer()
    from tokenizers import normalizers

    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    found = [fingerprint(model, tokenizer) for tokenizer in (with_token, with_bos, lower)]
    assert [differing(first, other) for other in found] == [{"tokenizer"}] * 3
    assert len({f.digest for f in [first, *found]}) == 4


def test_one_merge_changes_the_tokenizer() -> None:
    model, tokenizer = random_model(), small_tokenizer()
    first = fingerprint(model, tokenizer)
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    state = tokenizer.backend_tokenizer.to_str()
    merges = re.search(r'"merges":\[(\[[^]]*\]),(\[[^]]*\])', state)
    assert merges
    swapped = state.replace(f"{merges[1]},{merges[2]}", f"{merges[2]},{merges[1]}", 1)
    assert swapped != state
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(swapped))
    assert differing(first, fingerprint(model, other)) == {"tokenizer"}


def test_padding_truncation_and_names_do_not_change_the_tokenizer() -> None:
    model, tokenizer = random_model(), small_tokenizer()
    first = fingerprint(model, tokenizer)
    tokenizer(["a", "the river"], padding=True, truncation=True, max_length=3)
    state = tokenizer.backend_tokenizer
    assert state.padding is not None and state.truncation is not None  # else this tests nothing
    assert fingerprint(model, tokenizer) == first
    tokenizer.name_or_path = "/another/place"
    tokenizer.chat_template = "{{ messages }}"
    tokenizer.padding_side = "left"
    tokenizer.model_max_length = 77
    assert fingerprint(model, tokenizer) == first


def test_a_slow_tokenizer_has_a_digest() -> None:
    class Slow:
        def __init__(self, **more: int) -> None:
            self.vocab = {"b": 1, "a": 0, **more}

        def get_vocab(self) -> dict[str, int]:
            return self.vocab

    model = random_model()
    assert fingerprint(model, Slow()) == fingerprint(model, Slow())
    assert differing(fingerprint(model, Slow()), fingerprint(model, Slow(c=2))) == {"tokenizer"}
