"""The benchmark of peers: its prompts, its driver in front of small fake peers, its results. No network, no peer."""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from conftest import random_model, random_text
from transformers import PreTrainedTokenizerFast

# Its files import each other, as when one of them is run.
sys.path.append(str(Path(__file__).parent.parent / "examples" / "benchmarks" / "peers"))

import peer_rag_blend
import peer_transformers
import run
from contestants import BFLOAT16, CONTESTANTS, Contestant
from environments import Environment, NotInstalledError
from measure import Result, measure
from peer_process import PeerError, PeerProcess
from prompts import CASES, CHUNK_TOKENS, HEAD_TOKENS, WARM_UP, Prompt, Texts, lines_of, make_prompts
from report import json_of, markdown_of, write
from weights import Model, NoWeightsError, requantise

from rag_blend.evaluation.speed.page import page_of, read_results
from rag_blend.evaluation.speed.peers import REFERENCE

HERE = Path(run.__file__).parent
SMALLEST_BLOCK = 16  # tokens; no cache reuses less

# A peer of four tokens. Its last argument says how it misbehaves when it meets "trouble" in a prompt.
FAKE = """
import math, os, sys, time
from array import array
from protocol import Details, Peer, arguments, serve

class Fake(Peer):
    version, settings = "7", {"kind": "fake"}

    def __init__(self, log, probabilities, trouble):
        self.log, self.probabilities, self.trouble = log, [float(p) for p in probabilities.split("/")], trouble

    def say(self, text):
        print("noise from a library")
        with open(self.log, "a") as file:
            file.write(f"{self.trouble} {text}\\n")

    def prepare(self, head, texts):
        self.say(f"prepare {head}+{'+'.join(texts)}")

    def first_token(self, prompt, found):
        self.say(f"prompt {prompt}")
        if "trouble" in prompt and self.trouble == "crash":
            raise SystemExit("out of cheese")
        if "trouble" in prompt and self.trouble == "hang":
            time.sleep(60)
        if "trouble" in prompt and self.trouble == "overflow":
            self.probabilities[0] = math.inf
        if "trouble" in prompt and self.trouble == "babble":
            os.write(9, b"this is not JSON\\n")
        self.length = len(prompt)
        found(self.probabilities.index(max(self.probabilities)))
        self.say("rest")

    def details(self):
        logprobs = array("f", map(math.log, self.probabilities)).tobytes() if self.trouble != "silent" else None
        return Details(self.length, None if self.trouble == "silent" else 3, logprobs)

parser = arguments(None)
parser.add_argument("--log")
parser.add_argument("--probabilities", default=".5/.25/.125/.125")
parser.add_argument("--trouble", default="none")
args = parser.parse_args()
os.dup2(1, 9)
serve(lambda: Fake(args.log, args.probabilities, args.trouble))
"""


@pytest.fixture
def fakes(tmp_path: Path) -> Iterator[Any]:
    """Starts fake peers: `fakes(*options, timeout_s=...)`; they write what they are asked to `tmp_path / "log"`."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE, "utf-8")
    started: list[PeerProcess] = []

    def start(*options: str, timeout_s: float = 30.0) -> PeerProcess:
        common = ["--model", "m", "--threads", "1", "--directory", "d", "--log", str(tmp_path / "log")]
        command = [sys.executable, str(script), *common, *options]
        variables = {**os.environ, "PYTHONPATH": str(HERE)}
        started.append(PeerProcess(command, variables, tmp_path, tmp_path / f"{len(started)}.err", timeout_s))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


def texts_of(tokenizer: PreTrainedTokenizerFast, seed: int = 0, paragraphs: int = 300) -> Texts:
    return Texts([random_text(number, 60) for number in range(paragraphs)], tokenizer, seed)


@pytest.fixture(scope="module")
def prompts(tokenizer: PreTrainedTokenizerFast) -> list[Prompt]:
    return make_prompts(texts_of(tokenizer), [1024], 2)


def prompt_of(case: str, text: str, turn: int = 1, length: int = 1024) -> Prompt:
    earlier = "" if case == "cold" else "before"
    return Prompt(case, length, turn, text, "head", ("a", "b"), earlier)  # type: ignore[arg-type]


class TestPrompts:
    def test_every_case_is_there_in_every_round_and_few_for_warming_up(self, prompts: list[Prompt]) -> None:
        measured = [(p.round, p.length, p.case) for p in prompts if p.round != WARM_UP]
        assert measured == [(turn, 1024, case) for turn in (1, 2) for case in CASES]
        assert [p.round for p in prompts[:2]] == [WARM_UP] * 2

    def test_pieces_have_their_lengths_and_keep_their_tokens_wherever_they_stand(
        self, prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast
    ) -> None:
        for prompt in prompts:
            head, *chunks = (tokenizer.encode(piece) for piece in (prompt.head, *prompt.chunks))
            assert [len(head), *map(len, chunks)] == [HEAD_TOKENS] + [CHUNK_TOKENS] * 2
            order = chunks[::-1] if prompt.case == "reordered" else chunks
            ids = [*head, *itertools.chain(*order)]
            assert tokenizer.encode(prompt.text)[: len(ids)] == ids
            assert len(tokenizer.encode(prompt.text)) > len(ids)  # the question

    def test_prompts_share_no_prefix_and_no_chunk(
        self, prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast
    ) -> None:
        for left, right in itertools.combinations(prompts, 2):
            pairs = zip(tokenizer.encode(left.text), tokenizer.encode(right.text), strict=False)
            assert sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)) < SMALLEST_BLOCK
        chunks = [chunk for prompt in prompts for chunk in prompt.chunks]
        assert len(set(chunks)) == len(chunks)

    def test_what_came_before_is_what_the_case_says(self, prompts: list[Prompt]) -> None:
        for prompt in prompts:
            in_order = prompt.head + "".join(prompt.chunks)
            if prompt.case == "cold":
                assert prompt.earlier == ""
                continue
            assert prompt.earlier.startswith(in_order)
            assert (prompt.text == prompt.earlier) == (prompt.case == "repeat")
            assert prompt.text.startswith(in_order) == (prompt.case != "reordered")
            if prompt.case == "reordered":
                assert prompt.text.startswith(prompt.head + "".join(reversed(prompt.chunks)))

    def test_the_seed_decides(self, prompts: list[Prompt], tokenizer: PreTrainedTokenizerFast) -> None:
        assert make_prompts(texts_of(tokenizer), [1024], 2) == prompts
        assert make_prompts(texts_of(tokenizer, seed=1), [1024], 2, seed=1) != prompts

    def test_too_little_text_and_lengths_of_half_a_chunk_are_refused(self, tokenizer: PreTrainedTokenizerFast) -> None:
        with pytest.raises(ValueError, match="--data"):
            make_prompts(texts_of(tokenizer, paragraphs=20), [1024], 2)
        with pytest.raises(ValueError, match="not 1000"):
            make_prompts(texts_of(tokenizer), [1000], 1)
        with pytest.raises(ValueError, match="at least two"):
            make_prompts(texts_of(tokenizer), [512], 1)  # one chunk has no other order

    def test_they_are_written_as_json_lines(self, prompts: list[Prompt]) -> None:
        rows = [json.loads(line) for line in lines_of(prompts)]
        assert [row["text"] for row in rows] == [prompt.text for prompt in prompts]
        assert {"case", "length", "round", "text"} <= set(rows[0])


class TestDriver:
    def test_peers_take_turns_and_only_what_is_not_cold_is_prepared(self, fakes: Any, tmp_path: Path) -> None:
        peers = {"a": fakes("--trouble", "a"), "b": fakes("--trouble", "b")}
        measure(peers, [prompt_of("cold", "x"), prompt_of("prefix", "y")], "a")
        assert (tmp_path / "log").read_text().splitlines() == [
            *("a prompt x", "a rest", "b prompt x", "b rest"),
            *("b prepare head+a+b", "b prompt before", "b rest", "b prompt y", "b rest"),
            *("a prepare head+a+b", "a prompt before", "a rest", "a prompt y", "a rest"),
        ]

    def test_answers_are_compared_with_the_reference(self, fakes: Any) -> None:
        peers = {
            "truth": fakes("--probabilities", ".5/.25/.125/.125"),
            "other": fakes("--probabilities", ".25/.5/.125/.125"),
            "silent": fakes("--trouble", "silent"),
        }
        results = measure(peers, [prompt_of("cold", "x"), prompt_of("cold", "yy", turn=2)], "truth")
        rows = {name: result.rows["cold", 1024] for name, result in results.items()}
        assert rows["truth"].kl == 0
        assert rows["other"].kl == pytest.approx(0.25 * math.log(2), rel=1e-6)
        assert rows["silent"].kl is None
        assert [rows[name].same_top1 for name in peers] == [[True] * 2, [False] * 2, [True] * 2]
        assert rows["silent"].prompt_tokens == [1, 2]
        assert (rows["truth"].cached_tokens, rows["silent"].cached_tokens) == ([3, 3], [])
        assert all(0 < seconds < 5 for seconds in rows["truth"].ttft_s)
        assert all(0 <= cpu_s < 1 for cpu_s in rows["truth"].cpu_s)

    def test_warming_up_is_not_counted(self, fakes: Any) -> None:
        results = measure({"a": fakes()}, [prompt_of("cold", "x", turn=WARM_UP), prompt_of("repeat", "y")], "a")
        assert list(results["a"].rows) == [("repeat", 1024)]
        assert len(results["a"].rows["repeat", 1024].prepare_s) == 1

    @pytest.mark.parametrize(
        ("trouble", "says"),
        [
            ("crash", "it stopped with exit code 1: out of cheese"),
            ("hang", "no answer within 2 s"),
            ("babble", "it said 'this is not JSON' instead of answering request 6"),
            ("overflow", "its log-probabilities are not all finite"),
        ],
    )
    def test_a_peer_that_fails_is_left_out_from_then_on(self, fakes: Any, trouble: str, says: str) -> None:
        bad = fakes("--trouble", trouble)
        bad._timeout_s = 2.0  # it is up, so this is for its answers only
        prompts = [prompt_of("repeat", "fine"), prompt_of("cold", "trouble"), prompt_of("prefix", "fine again")]
        results = measure({"bad": bad, "good": fakes()}, prompts, "good")
        assert results["bad"].error == f"cold, 1024 tokens: {says}"
        assert [case for case, _ in results["bad"].rows] == ["repeat"]
        assert [case for case, _ in results["good"].rows] == ["repeat", "cold", "prefix"]
        assert results["good"].error == ""

    def test_without_a_reference_nothing_is_compared(self, fakes: Any) -> None:
        bad = fakes("--trouble", "crash")
        results = measure({"bad": bad, "good": fakes()}, [prompt_of("cold", "trouble")], "bad")
        row = results["good"].rows["cold", 1024]
        assert (row.kl, row.same_top1, len(row.ttft_s)) == (None, [], 1)

    def test_a_peer_that_does_not_come_up_says_why(self, fakes: Any, tmp_path: Path) -> None:
        with pytest.raises(PeerError, match=r"exit code 2: .*unrecognized arguments: --nonsense"):
            fakes("--nonsense")
        with pytest.raises(PeerError, match=r"cannot be started: .*no-such-program"):
            PeerProcess(["no-such-program"], {}, tmp_path, tmp_path / "err", 1.0)

    def test_closing_ends_even_a_peer_that_hangs(self, fakes: Any) -> None:
        peer = fakes("--trouble", "hang", timeout_s=20.0)
        peer._timeout_s = 0.5
        with pytest.raises(PeerError, match="no answer"):
            peer.ask("trouble")
        peer.close()
        assert peer._process.poll() is not None


class TestReport:
    @pytest.fixture
    def results(self, fakes: Any) -> list[Result]:
        peers = {"truth": fakes(), "silent": fakes("--trouble", "silent")}
        prompts = [prompt_of("cold", "x"), prompt_of("cold", "x", turn=2), prompt_of("reordered", "y", length=2048)]
        return [*measure(peers, prompts, "truth").values(), Result("absent", error="npm is not on the PATH")]

    def test_json_has_the_agreed_fields(self, results: list[Result], tmp_path: Path) -> None:
        write(results, {"CPU": "a fast one"}, "truth", tmp_path / "out")
        for result in results:
            data = json.loads((tmp_path / "out" / f"{result.peer}.json").read_text("utf-8"))
            assert data == json_of(result)
            assert {"peer", "version", "settings", "rows"} <= set(data)
            assert isinstance(data["version"], str)
            for row in data["rows"]:
                assert {"case", "length", "ttft_s", "cpu_s", "kl"} <= set(row)
                assert row["case"] in CASES
                assert len(row["ttft_s"]) == len(row["cpu_s"]) == (2 if row["case"] == "cold" else 1)
                assert row["kl"] is None or row["kl"] >= 0
        assert json_of(results[2])["error"] == "npm is not on the PATH"
        assert json_of(results[0])["settings"] == {"kind": "fake"}

    def test_they_are_on_the_page_of_all_benches(self, results: list[Result], tmp_path: Path) -> None:
        write(results, {}, "truth", tmp_path)
        page = page_of(read_results([tmp_path]))
        assert "### 1,024 tokens of chunks: cold" in page and "### 2,048 tokens of chunks: other order" in page
        assert "| truth | 7 | kind fake |" in page and "| absent |  | npm is not on the PATH |" in page

    def test_markdown_names_everyone_and_why_some_are_missing(self, results: list[Result]) -> None:
        text = markdown_of(results, {"CPU": "a fast one"}, "truth")
        assert "- CPU: a fast one" in text
        assert [line for line in text.splitlines() if line.startswith("## ")] == [
            *("## 1,024 tokens in chunks", "## 2,048 tokens in chunks", "## What they are"),
            "## Left out, or stopped",
        ]
        assert "| truth | 0, 2 of 2 |  |  |  |" in text
        assert "| silent | 2 of 2 |  |  |  |" in text
        assert "| silent | ? of 1 |  |  |  |" in text
        assert "- **absent**: npm is not on the PATH" in text


class TestEnvironments:
    @pytest.fixture
    def npm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """An npm that writes down how it was called, and fails for the package `broken`."""
        programs = tmp_path / "programs"
        programs.mkdir()
        script = (
            f'#!/bin/sh\necho "$@" >> {programs}/calls\n'
            'case "$*" in *broken*) echo "npm error E404" >&2; echo "see the log" >&2; exit 1;; esac\n'
        )
        (programs / "npm").write_text(script, "utf-8")
        (programs / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", str(programs), prepend=os.pathsep)
        return programs / "calls"

    def test_it_is_made_once_and_again_when_its_recipe_changes(self, npm: Path, tmp_path: Path) -> None:
        for _ in range(2):
            Environment("node", npm=("thing@1",)).make(tmp_path)
        Environment("node", npm=("thing@2",)).make(tmp_path)
        assert [line.split()[-1] for line in npm.read_text("utf-8").splitlines()] == ["thing@1", "thing@2"]

    def test_a_failure_says_why_and_is_tried_again(self, npm: Path, tmp_path: Path) -> None:
        for _ in range(2):
            with pytest.raises(NotInstalledError, match="npm failed: npm error E404"):
                Environment("node", npm=("broken@1",)).make(tmp_path)
        assert len(npm.read_text("utf-8").splitlines()) == 2

    def test_a_missing_program_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        with pytest.raises(NotInstalledError, match="npm is not on the PATH"):
            Environment("node", npm=("thing@1",)).make(tmp_path)

    def test_every_contestant_has_its_script_and_a_name_of_its_own(self) -> None:
        everyone = CONTESTANTS + BFLOAT16
        assert all((HERE / one.script).is_file() for one in everyone)
        assert len({one.name for one in everyone}) == len(everyone)
        assert REFERENCE in {one.name for one in CONTESTANTS}


class TestWeights:
    def test_requantised_weights_are_the_same_but_for_rounding(self, tmp_path: Path) -> None:
        rng = np.random.default_rng(0)
        tensors = {name: rng.standard_normal((64, 64), dtype=np.float32) for name in ("token_embd.weight", "blk.0.q")}
        tensors["norm"] = rng.standard_normal(64, dtype=np.float32)
        source = tmp_path / "model.F32.gguf"
        writer = gguf.GGUFWriter(source, "llama")
        writer.add_context_length(2048)
        writer.add_token_list(["a", "b"])
        for name, values in tensors.items():
            writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()

        requantise(source, tmp_path / "made.gguf", gguf.GGMLQuantizationType.Q4_0)
        reader = gguf.GGUFReader(tmp_path / "made.gguf")
        assert reader.fields["llama.context_length"].contents() == 2048
        assert reader.fields["tokenizer.ggml.tokens"].contents() == ["a", "b"]
        assert {t.name: t.tensor_type.name for t in reader.tensors} == {
            "token_embd.weight": "Q8_0",
            "blk.0.q": "Q4_0",
            "norm": "F32",
        }
        for tensor in reader.tensors:
            error = np.abs(gguf.quants.dequantize(tensor.data, tensor.tensor_type) - tensors[tensor.name]).max()
            assert error < {"Q8_0": 0.02, "Q4_0": 0.4, "F32": 1e-9}[tensor.tensor_type.name]
        assert not list(tmp_path.glob("*.part"))

    def test_a_file_is_made_once_and_none_where_there_is_no_gguf(self, tmp_path: Path) -> None:
        shipped = tmp_path / "model.Q4_1.gguf"
        shipped.touch()
        assert Model(tmp_path, shipped).weights("Q4_1", tmp_path) == shipped
        assert Model(tmp_path, None).weights("hf", tmp_path) == tmp_path
        with pytest.raises(NoWeightsError, match="--gguf"):
            Model(tmp_path, None).weights("Q4_0", tmp_path)


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    directory = tmp_path_factory.mktemp("tiny")
    random_model().save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def logprobs_of(peer: Any, prompt: str) -> tuple[np.ndarray, int]:
    """Log-probabilities of the first token, and the prompt's cached tokens."""
    found: list[int] = []
    peer.first_token(prompt, found.append)
    details = peer.details()
    values = np.frombuffer(details.logprobs, np.float32)
    assert found == [int(values.argmax())]
    return values, details.cached_tokens


class TestOwnPeers:
    @pytest.fixture(autouse=True)
    def _threads(self) -> Iterator[None]:
        import torch

        before = torch.get_num_threads()
        yield
        torch.set_num_threads(before)

    def test_a_cropped_prefix_gives_what_full_prefill_gives(
        self, tiny_model: Path, tokenizer: PreTrainedTokenizerFast
    ) -> None:
        full, cached = (
            peer_transformers.Transformers(str(tiny_model), 2, "float32", prefix_cache)
            for prefix_cache in (False, True)
        )
        start = random_text(0)
        prompts = [start, start, f"{start} {random_text(1)}", f"{start} {random_text(2)}", random_text(3), start]
        lengths = [len(tokenizer.encode(prompt)) for prompt in prompts]
        kept = []
        for prompt in prompts:
            wanted, none = logprobs_of(full, prompt)
            got, some = logprobs_of(cached, prompt)
            np.testing.assert_allclose(got, wanted, atol=1e-4)
            assert none == 0
            kept.append(some)
        assert kept[:3] == [0, lengths[0] - 1, lengths[0]]
        assert lengths[0] <= kept[3] < lengths[3]
        assert kept[4] < SMALLEST_BLOCK

    def test_ours_reuses_what_was_prepared_and_computes_what_was_not(self, tiny_model: Path, tmp_path: Path) -> None:
        ours = peer_rag_blend.RagBlend(str(tiny_model), 2, str(tmp_path), "float32", {})
        full = peer_transformers.Transformers(str(tiny_model), 2, "float32", False)
        head, texts = random_text(0) + "\n", [random_text(1) + "\n", random_text(2) + "\n"]
        prompt = head + texts[1] + texts[0] + "what?"
        got, cached = logprobs_of(ours, prompt)
        np.testing.assert_allclose(got, logprobs_of(full, prompt)[0], atol=1e-4)
        assert cached == 0
        ours.prepare(head, texts)
        assert logprobs_of(ours, f"{head}{texts[1]}{texts[0]}where?")[1] > 60


def test_the_whole_run_with_fakes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fake.py"
    script.write_text(FAKE, "utf-8")
    log = ("--log", str(tmp_path / "log"))
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    monkeypatch.setattr(
        run,
        "CONTESTANTS",
        (
            Contestant(REFERENCE, str(script), None, options=log),
            Contestant("needs-gguf", str(script), None, "Q4_0", log),
            Contestant("does-not-start", str(script), None, options=("--nonsense",)),
        ),
    )
    data = tmp_path / "data.jsonl"
    passages = [{"text": random_text(number)} for number in range(200)]
    data.write_text(json.dumps({"question": "q", "answers": [], "passages": passages}) + "\n", "utf-8")
    cores = os.sched_getaffinity(0)
    options = {"model": tiny_model, "root": tmp_path / "root", "out": tmp_path / "out", "data": data, "rounds": 1}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--lengths=1024", "--threads=1"])
    try:
        run.main()
        assert len(os.sched_getaffinity(0)) == 1
    finally:
        os.sched_setaffinity(0, cores)

    files = {path.stem: json.loads(path.read_text("utf-8")) for path in (tmp_path / "out").glob("*.json")}
    assert [row["case"] for row in files[REFERENCE]["rows"]] == list(CASES)
    assert files["needs-gguf"]["error"] == "it reads GGUF files; name one with --gguf"
    assert "unrecognized arguments: --nonsense" in files["does-not-start"]["error"]
    assert len((tmp_path / "out" / "prompts.jsonl").read_text("utf-8").splitlines()) == 6
    assert not list((tmp_path / "root").glob("peer-*"))  # what peers kept is gone
    assert "needs-gguf: it reads GGUF files" in capsys.readouterr().err


def test_more_threads_than_cores_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", "--threads=4096"])
    with pytest.raises(SystemExit, match="--threads must be from 1 to"):
        run.main()
