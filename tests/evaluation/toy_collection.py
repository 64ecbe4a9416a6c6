"""Fixtures: a toy collection of random words, five passages a case.

A plugin rather than a conftest.py, which would hide the one that holds the random models.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import random_model, random_text, small_tokenizer
from transformers import PreTrainedModel

from rag_blend.evaluation import Case, Passage


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    return random_model(max_position_embeddings=4096)


@pytest.fixture(scope="session")
def passages() -> list[Passage]:
    return [Passage(random_text(seed, 40), f"Title {seed}", seed == 1) for seed in range(5)]


@pytest.fixture(scope="session")
def cases(passages: list[Passage]) -> list[Case]:
    return [
        Case(str(i), "qa", f"the old river {i}?", ("green light",), (*passages[i:], *passages[:i]), dataset="toy")
        for i in range(3)
    ]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory, model: PreTrainedModel) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny-model"
    model.save_pretrained(directory)
    small_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def data_file(tmp_path: Path, cases: list[Case]) -> Path:
    path = tmp_path / "toy.jsonl"
    rows = [
        {
            "question": case.question,
            "answers": list(case.answers),
            "passages": [{"title": p.title, "text": p.text, "supporting": p.supporting} for p in case.passages],
        }
        for case in cases
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path
