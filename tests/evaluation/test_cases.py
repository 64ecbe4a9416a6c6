"""Both formats, how passages are chosen, and what malformed files are told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rag_blend.evaluation import Case, Passage, joined, load_cases, shuffled
from rag_blend.evaluation.cases import ingestible

DATA = Path(__file__).parents[3] / "shared" / "data"


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return path


def question(number: int, supporting: int = 2, count: int = 4) -> dict[str, object]:
    texts = [{"title": f"T{i}", "text": f"text {number}.{i}", "supporting": i == supporting} for i in range(count)]
    return {"id": f"q{number}", "question": f"Question {number}?", "answers": [f"a{number}"], "passages": texts}


def article(name: str, paragraphs: int, questions: int) -> dict[str, object]:
    return {
        "title": name,
        "paragraphs": [
            {
                "text": f"{name} paragraph {p}",
                "qas": [{"question": f"{name}.{p}.{q}?", "answers": [f"{name}{p}{q}"]} for q in range(questions)],
            }
            for p in range(paragraphs)
        ],
    }


def texts(case: Case) -> list[str]:
    return [passage.text for passage in case.passages]


class TestQuestions:
    def test_a_row_becomes_a_case(self, tmp_path: Path) -> None:
        (case,) = load_cases(write(tmp_path / "some.jsonl", question(1)))
        assert (case.id, case.task, case.dataset, case.group) == ("q1", "qa", "some", "some")
        assert case.question == "Question 1?" and case.answers == ("a1",) and case.answerable
        assert texts(case) == ["text 1.0", "text 1.1", "text 1.2", "text 1.3"]
        assert [passage.supporting for passage in case.passages] == [False, False, True, False]

    def test_optional_fields(self, tmp_path: Path) -> None:
        row = {"question": "q?", "answers": [], "passages": [{"text": " only text\n"}]}
        (case,) = load_cases(write(tmp_path / "some.jsonl", "", row))
        assert case.id == "2"  # the line
        assert not case.answerable
        assert case.passages == (Passage("only text"),)

    def test_a_title_stands_on_a_line_of_its_own(self) -> None:
        assert Passage("The text.", "The title").prompt_text == "The title\nThe text."
        assert Passage("The text.").prompt_text == "The text."

    def test_passages_may_be_parts_of_a_document(self, tmp_path: Path) -> None:
        passages = [{"text": "one", "document": "d"}, {"text": "two"}, {"text": "three", "document": "d"}]
        row = {"question": "q?", "answers": [], "passages": passages}
        cases = load_cases(write(tmp_path / "some.jsonl", row, row))
        assert ingestible(cases) == {"one": "d", "two": "", "three": "d"}

    def test_few_passages_keep_the_supporting_one_and_the_order(self, tmp_path: Path) -> None:
        path = write(tmp_path / "some.jsonl", question(1, supporting=3))
        assert texts(load_cases(path, num_passages=2)[0]) == ["text 1.0", "text 1.3"]
        assert texts(load_cases(path, num_passages=1)[0]) == ["text 1.3"]
        assert len(load_cases(path, num_passages=9)[0].passages) == 4

    def test_limit_and_seed(self, tmp_path: Path) -> None:
        path = write(tmp_path / "some.jsonl", *[question(i) for i in range(20)])
        assert [case.id for case in load_cases(path, limit=3)] == ["q0", "q1", "q2"]
        drawn = [case.id for case in load_cases(path, limit=3, seed=1)]
        assert drawn == [case.id for case in load_cases(path, limit=3, seed=1)]
        assert drawn != [case.id for case in load_cases(path, limit=3, seed=2)] and drawn != ["q0", "q1", "q2"]


class TestCorpus:
    def test_passages_come_from_the_article_and_those_that_follow(self, tmp_path: Path) -> None:
        path = write(tmp_path / "c.jsonl", article("A", 2, 1), article("B", 3, 1), article("C_c", 2, 1))
        cases = {case.question: case for case in load_cases(path, num_passages=5)}
        assert texts(cases["B.1.0?"]) == [f"B paragraph {i}" for i in range(3)] + [f"C_c paragraph {i}" for i in (0, 1)]
        assert [passage.supporting for passage in cases["B.1.0?"].passages] == [False, True, False, False, False]
        assert texts(cases["C_c.0.0?"])[2:] == ["A paragraph 0", "A paragraph 1", "B paragraph 0"]
        assert cases["C_c.0.0?"].passages[0].title == "C c"
        ordered = [text for text, document in ingestible(reversed(cases.values())).items() if document == "c:2"]
        assert ordered == [f"B\nB paragraph {i}" for i in range(3)]
        documents = [passage.document for passage in cases["C_c.0.0?"].passages]
        assert documents == ["c:3", "c:3", "c:1", "c:1", "c:2"]

    def test_a_long_article_keeps_the_question_own_paragraph(self, tmp_path: Path) -> None:
        path = write(tmp_path / "c.jsonl", article("A", 6, 1))
        last = load_cases(path, num_passages=3)[-1]
        assert last.question == "A.5.0?"
        assert texts(last) == ["A paragraph 0", "A paragraph 1", "A paragraph 5"]
        assert len(load_cases(write(tmp_path / "d.jsonl", article("A", 15, 1)))[0].passages) == 10

    def test_questions_are_taken_in_turn(self, tmp_path: Path) -> None:
        path = write(tmp_path / "c.jsonl", article("A", 2, 2), article("B", 1, 1), article("C", 1, 3))
        asked = [case.question for case in load_cases(path, limit=7)]
        assert asked == ["A.0.0?", "B.0.0?", "C.0.0?", "A.1.0?", "C.0.1?", "A.0.1?", "C.0.2?"]
        assert len({case.id for case in load_cases(path)}) == 8


class TestShuffled:
    def test_it_permutes_and_repeats(self) -> None:
        case = Case("1", "qa", "q?", ("a",), tuple(Passage(str(i)) for i in range(10)))
        once = shuffled(case, 1)
        assert once == shuffled(case, 1) != case
        assert sorted(texts(once)) == sorted(texts(case))
        assert shuffled(case, 2) != once


class TestJoined:
    def test_as_they_stand_in_a_prompt(self) -> None:
        passages = (Passage("a", "A"), Passage("b", supporting=True), Passage("c"))
        once = joined(Case("1", "qa", "q?", ("a",), passages), 2)
        assert once.passages == (Passage("A\na\n\nb", supporting=True), Passage("c"))

    def test_of_one_document_they_stay_a_part_of_it(self) -> None:
        passages = tuple(Passage(str(i), document="ab"[i // 3], place=i) for i in range(5))
        once = joined(Case("1", "qa", "q?", ("a",), passages), 2)
        assert [(p.text, p.document, p.place) for p in once.passages] == [
            ("0\n\n1", "a", 0), ("2\n\n3", "", 2), ("4", "b", 4),
        ]  # fmt: skip


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{not json", "not JSON"),
        ("[1]", "a row must be an object, not list"),
        ({"answers": ["a"], "passages": [{"text": "t"}]}, "'question' must be a string"),
        ({"question": "q", "answers": "a", "passages": [{"text": "t"}]}, "'answers' must be a list of strings"),
        ({"question": "q", "answers": [""], "passages": [{"text": "t"}]}, "'answers' must be a list of strings"),
        ({"question": "q", "answers": ["a"], "passages": []}, "'passages' must be a list of objects"),
        ({"question": "q", "answers": ["a"], "passages": ["t"]}, "'passages' must be a list of objects"),
        ({"question": "q", "answers": ["a"], "passages": [{"text": " "}]}, "'text' must be a string"),
        ({"question": "q", "answers": ["a"], "passages": [{"text": "t", "supporting": 1}]}, "'supporting' must be"),
        ({"paragraphs": [{"text": "t", "qas": []}]}, "one format per file"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, row: object, complaint: str) -> None:
    path = write(tmp_path / "bad.jsonl", question(1), row)
    with pytest.raises(ValueError, match=complaint) as error:
        load_cases(path)
    line = 1 if "one format" in complaint else 2
    assert str(error.value).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("article_row", "complaint"),
    [
        ({"paragraphs": [{"text": "t", "qas": "?"}]}, "'qas' must be a list"),
        ({"paragraphs": [{"qas": []}]}, "'text' must be a string"),
        ({"paragraphs": [{"text": "t", "qas": [{"question": "q"}]}]}, "'answers' must be a list"),
    ],
)
def test_a_malformed_article_is_named(tmp_path: Path, article_row: object, complaint: str) -> None:
    path = write(tmp_path / "bad.jsonl", article_row)
    with pytest.raises(ValueError, match=complaint) as error:
        load_cases(path)
    assert str(error.value).startswith(f"{path}:1: ")


def test_files_without_cases(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"empty\.jsonl: the file has no rows"):
        load_cases(write(tmp_path / "empty.jsonl", ""))
    with pytest.raises(ValueError, match=r"none\.jsonl: the file has no questions"):
        load_cases(write(tmp_path / "none.jsonl", {"paragraphs": [{"text": "t"}]}))
    with pytest.raises(FileNotFoundError):
        load_cases(tmp_path / "absent.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b'{"question": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"latin\.jsonl: not UTF-8"):
        load_cases(tmp_path / "latin.jsonl")


@pytest.mark.parametrize("numbers", [{"limit": 0}, {"num_passages": 0}])
def test_numbers_must_be_positive(tmp_path: Path, numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        load_cases(write(tmp_path / "some.jsonl", question(1)), **numbers)


@pytest.mark.skipif(not DATA.is_dir(), reason="the evaluation data is not kept in this repository")
@pytest.mark.parametrize(("name", "passages"), [("musique", 20), ("hotpotqa", 10), ("xquad_en", 10)])
def test_the_evaluation_data_can_be_read(name: str, passages: int) -> None:
    cases = load_cases(DATA / f"{name}.jsonl", limit=40)
    assert len(cases) == 40
    assert all(any(passage.supporting for passage in case.passages) for case in cases)
    assert max(len(case.passages) for case in cases) == passages
    if name == "xquad_en":  # every one of the 24 articles is asked about
        assert len({p.title for case in cases for p in case.passages if p.supporting}) == 24
