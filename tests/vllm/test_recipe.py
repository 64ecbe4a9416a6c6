"""Salts and request fields: what a client says and the server checks. Needs no vLLM."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rag_blend.vllm import Recipe, request_fields
from rag_blend.vllm.options import Options
from rag_blend.vllm.recipe import recipe_of


def read(fields: dict, secret: str = "") -> Recipe | None:
    return recipe_of(fields.get("kv_transfer_params"), fields.get("cache_salt"), secret)


def test_the_server_reads_what_a_client_says() -> None:
    assert read(request_fields("a", "hkvd", 0.2, "s"), "s") == Recipe("a", "hkvd", 0.2)


def test_requests_without_a_recipe_have_none() -> None:
    assert recipe_of(None, None) is None
    assert recipe_of({"do_remote_prefill": True}, "salt") is None


def test_everything_that_decides_what_is_in_a_block_is_in_the_salt() -> None:
    recipes = [("a", "heads", None), ("b", "heads", None), ("a", "none", None), ("a", "heads", 0.1)]
    salts = {Recipe(*recipe).salt(secret) for recipe in recipes for secret in ("", "s")}
    assert len(salts) == 2 * len(recipes)
    assert Recipe(recompute_ratio=1).salt() == Recipe(recompute_ratio=1.0).salt()


@pytest.mark.parametrize(
    "change", [{"cache_salt": None}, {"cache_salt": "0" * 64}, {"cache_salt": Recipe("b").salt("s")}]
)
def test_another_salt_is_refused(change: dict) -> None:
    with pytest.raises(ValueError, match="cache_salt"):
        read({**request_fields("a", secret="s"), **change}, "s")


def test_a_salt_made_without_the_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="secret"):
        read(request_fields("a"), "s")


@pytest.mark.parametrize("said", [[], "heads", {"namespace": 1}, {"selektor": "heads"}, {"recompute_ratio": "much"}])
def test_malformed_parameters_are_refused(said: object) -> None:
    with pytest.raises(ValueError, match="malformed"):
        recipe_of({"rag_blend": said}, "salt")


def test_clients_need_neither_vllm_nor_torch() -> None:
    code = "import sys, rag_blend.vllm; sys.exit(bool({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "where the chunks are"),
        ({"storage": "kv", "sekret": 1}, "sekret"),
        ({"storage": "memory://"}, "shares"),
        ({"storage": "Memory://?quota=2GB"}, "shares"),
        ({"storage": "kv", "namespaces": "team"}, "must be a list"),
        ({"storage": "kv", "kv_dtype": "int8"}, "kv_dtype"),
        ({"storage": "kv", "max_rows": 0}, "max_rows"),
    ],
)
def test_wrong_options_are_named(given: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Options.of(given)
