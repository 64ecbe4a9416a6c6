"""The benchmark of vLLM's OpenAI server: its prompts, its servers' options, its driver in front of small fake servers.

No vLLM: `make bench-vllm` runs the real thing.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from conftest import random_model, random_text
from transformers import PreTrainedTokenizerFast

# Its files import each other and those of the benchmark of peers, as when one of them is run.
sys.path.append(str(Path(__file__).parent.parent / "examples" / "benchmarks" / "peers"))
sys.path.append(str(Path(__file__).parent.parent / "examples" / "benchmarks" / "serving"))

import run_vllm
from lineup import REFERENCE, SERVED_MODEL, Contender, command_of, contenders, intel_openmp, variables
from openai_stream import Answer, ServerError
from prompts import CHUNK_TOKENS, HEAD_TOKENS, WARM_UP
from serving_report import VIEW, rows_of
from sessions import CASES, Load, Round, make_rounds, texts_for
from turns import Results, measure
from vllm_process import Burst, VllmServer, free_ports

from rag_blend.evaluation.speed.report import SpeedReport
from rag_blend.vllm.options import Options
from rag_blend.vllm.recipe import recipe_of

# Answers as vLLM does. It waits until --together requests are there, writes each to --log, and fails as it is told.
FAKE = """
import argparse, json, subprocess, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
parser.add_argument("--log")
parser.add_argument("--together", type=int, default=1)
parser.add_argument("--trouble", default="none")
args, _ = parser.parse_known_args()
if args.trouble == "no-start":
    print("ValueError: out of cheese\\nthe end")
    sys.exit(3)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
together = threading.Barrier(args.together)

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.reply(json.dumps({"version": "7"}), 503 if args.trouble == "not-ready" else 200)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        together.wait(20)
        with open(args.log, "a") as file:
            file.write(json.dumps(body) + "\\n")
        words = len(body["prompt"].split())
        usage = {"prompt_tokens": words, "completion_tokens": body["max_tokens"], "total_tokens": 0}
        if args.trouble == "refuse":
            return self.reply(json.dumps({"error": {"message": "no cheese"}}), 400)
        if not body.get("stream"):
            report = {"rag_blend": {"reused_tokens": words, "recomputed_tokens": 1}}
            choice = {"index": 0, "text": "x", "finish_reason": "length"}
            rest = {"kv_transfer_params": report if "cache_salt" in body else None, "usage": usage}
            return self.reply(json.dumps({**chunk(choice), **rest}))
        if args.trouble != "untold":
            usage["prompt_tokens_details"] = {"cached_tokens": 3}
        self.reply(None)
        for number in range(0 if args.trouble == "silent" else body["max_tokens"]):
            self.say(chunk({"index": 0, "text": f"word{number} "}))
            time.sleep(0.05)
        self.say({**chunk(), "usage": usage})
        self.wfile.write(b"data: [DONE]\\n\\n")

    def reply(self, text, status=200):
        self.send_response(status)
        self.send_header("Content-Type", "text/event-stream" if text is None else "application/json")
        self.end_headers()
        self.wfile.write((text or "").encode())

    def say(self, fields):
        self.wfile.write(f"data: {json.dumps(fields)}\\n\\n".encode())
        self.wfile.flush()

    def log_message(self, *_):
        pass

def chunk(*choices):
    return {"id": "1", "object": "text_completion", "created": 1, "model": "model", "choices": choices}

ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
"""
NEW_TOKENS = 4


def command_of_fake(script: Path, port: int, *options: str) -> list[str]:
    script.write_text(FAKE, "utf-8")
    return [sys.executable, str(script), "--port", str(port), *options]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., VllmServer]]:
    """Starts fake servers: `start(*options, fields=..., timeout_s=...)`; they write requests to `tmp_path / "log"`."""
    started: list[VllmServer] = []

    def start(*options: str, fields: Mapping[str, Any] | None = None, timeout_s: float = 30.0) -> VllmServer:
        (port,) = free_ports(1)
        command = command_of_fake(tmp_path / "fake.py", port, "--log", str(tmp_path / "log"), *options)
        output = tmp_path / f"{len(started)}.out"
        started.append(VllmServer(command, os.environ, port, output, fields or {}, NEW_TOKENS, timeout_s))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture(scope="module")
def rounds(tokenizer: PreTrainedTokenizerFast) -> list[Round]:
    loads = [Load(1, 1024, 2), Load(2, 1024, 1)]
    return make_rounds(loads, texts_for(loads, tokenizer, []))


class TestSessions:
    def test_loads_are_read(self) -> None:
        assert Load.parse("8x2048x5") == Load(clients=8, length=2048, rounds=5)

    @pytest.mark.parametrize("text", ["8x2048", "8x2048x1x1", "eightx2048x1", "0x2048x1", "1x512x1", "1x1100x1"])
    def test_what_is_no_load_is_refused(self, text: str) -> None:
        with pytest.raises(ValueError, match=rf"a load .* not '{text}'"):
            Load.parse(text)

    def test_loads_take_turns_behind_a_warm_up(self, rounds: list[Round]) -> None:
        assert [(one.load.clients, one.number) for one in rounds] == [(1, WARM_UP), (1, 1), (2, 1), (1, 2)]
        assert [len(one.sessions) for one in rounds] == [1, 1, 2, 1]
        assert rounds[0].cases == CASES[1:] and rounds[1].cases == CASES

    def test_cases_are_what_they_are_called(self, rounds: list[Round]) -> None:
        for session in (session for one in rounds for session in one.sessions):
            new, reordered = session.prompt("new"), session.prompt("reordered")
            assert session.prompt("repeat") == new != reordered
            for prompt, chunks in ((new, session.known.chunks), (reordered, session.known.chunks[::-1])):
                assert prompt.startswith(session.known.head + "".join(chunks) + "\nQuestion:")
            assert not any(chunk in session.prompt("cold") for chunk in session.known.chunks)

    def test_no_text_stands_in_two_sessions(self, rounds: list[Round], tokenizer: PreTrainedTokenizerFast) -> None:
        sessions = [session for one in rounds for session in one.sessions]
        prompts = [prompt for session in sessions for prompt in (session.unknown, session.known)]
        chunks = [chunk for prompt in prompts for chunk in prompt.chunks]
        assert len(set(chunks)) == len(chunks) == 2 * len(prompts)
        assert {len(tokenizer.encode(chunk)) for chunk in chunks} == {CHUNK_TOKENS}
        for left, right in itertools.combinations((tokenizer.encode(prompt.head) for prompt in prompts), 2):
            assert left[:6] != right[:6] and len(left) == len(right) == HEAD_TOKENS

    def test_ones_own_texts_may_be_too_short(self, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
        data = tmp_path / "data.jsonl"
        data.write_text(json.dumps({"question": "q", "answers": [], "passages": [{"text": random_text(0)}]}), "utf-8")
        loads = [Load(1, 1024, 1)]
        with pytest.raises(ValueError, match="not enough text"):
            make_rounds(loads, texts_for(loads, tokenizer, [data]))


class TestLineup:
    def command(self, name: str, storage: Path = Path("kv")) -> list[str]:
        one = next(one for one in contenders(storage) if one.name == name)
        return command_of(one, "python", Path("dir"), 1234, 2400, 8, "float32")

    def test_all_get_the_same_but_for_what_is_compared(self) -> None:
        plain, stock, ours = (self.command(one.name) for one in contenders(Path("kv")))
        assert plain[:-1] == stock[:-1] == ours[: len(stock) - 1]
        assert (plain[-1], stock[-1]) == ("--no-enable-prefix-caching", "--enable-prefix-caching")
        assert ours[len(stock) - 1] == stock[-1] and plain[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
        options = dict(itertools.pairwise(plain))
        assert (options["--model"], options["--port"], options["--served-model-name"]) == ("dir", "1234", SERVED_MODEL)
        assert (options["--max-model-len"], options["--max-num-seqs"], options["--dtype"]) == ("2400", "8", "float32")
        assert "--enable-prompt-tokens-details" in plain  # or no server would tell what it had cached

    def test_ours_is_understood_by_the_connector(self, tmp_path: Path) -> None:
        command = self.command("rag_blend-heads", tmp_path)
        connector = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert Options.of(connector["kv_connector_extra_config"]).storage == str(tmp_path)
        fields = next(one.fields for one in contenders(tmp_path) if one.name == "rag_blend-heads")
        recipe = recipe_of(fields["kv_transfer_params"], fields["cache_salt"])
        assert recipe is not None and recipe.selector == "heads"

    def test_the_others_are_asked_for_nothing_special(self) -> None:
        assert [one.name for one in contenders(Path("kv")) if not one.fields] == [REFERENCE, "vllm-prefix-caching"]

    def test_variables(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RAG_BLEND_SECRET", "of somebody's servers")  # with it, requests would need another salt
        monkeypatch.setenv("OMP_WAIT_POLICY", "active")
        told = variables(3, 2, None)
        assert (told["OMP_NUM_THREADS"], told["OMP_WAIT_POLICY"], told["VLLM_CPU_KVCACHE_SPACE"]) == (
            "3",
            "passive",
            "2",
        )
        assert "RAG_BLEND_SECRET" not in told and told["PATH"] == os.environ["PATH"]
        assert variables(3, 2, Path("lib.so"))["LD_PRELOAD"] == "lib.so"

    def test_openmp_is_found_beside_the_interpreter(self, tmp_path: Path) -> None:
        python = tmp_path / "bin" / "python"
        assert intel_openmp(python) is None
        (tmp_path / "lib").mkdir()
        (tmp_path / "lib" / "libiomp5.so").touch()
        assert intel_openmp(python) == tmp_path / "lib" / "libiomp5.so"


class TestServer:
    def test_an_answer_is_timed_and_counted(self, start: Callable[..., VllmServer], tmp_path: Path) -> None:
        server = start(fields={"cache_salt": "salt"})
        assert server.wait() == "7"
        burst = server.ask(["one two three"])
        (answer,) = burst.answers
        assert answer.pieces == ("word0 ", "word1 ", "word2 ", "word3 ")
        assert (answer.prompt_tokens, answer.cached_tokens, answer.new_tokens) == (3, 3, NEW_TOKENS)
        assert 0 < answer.ttft_s < answer.total_s - 0.1 and burst.wall_s >= answer.total_s and burst.cpu_s >= 0
        body = json.loads((tmp_path / "log").read_text("utf-8"))
        assert body == {
            "model": SERVED_MODEL, "prompt": "one two three", "max_tokens": NEW_TOKENS, "temperature": 0,
            "stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True, "cache_salt": "salt",
        }  # fmt: skip

    def test_prompts_are_sent_at_once(self, start: Callable[..., VllmServer]) -> None:
        server = start("--together", "3")  # it answers nobody before all three are there
        server.wait()
        assert [answer.prompt_tokens for answer in server.ask(["a", "a b", "a b c"]).answers] == [1, 2, 3]

    def test_a_server_may_keep_its_cache_to_itself(self, start: Callable[..., VllmServer]) -> None:
        server = start("--trouble", "untold")
        server.wait()
        assert server.ask(["a"]).answers[0].cached_tokens is None

    def test_reuse_is_what_the_connector_reports(self, start: Callable[..., VllmServer]) -> None:
        plain, ours = start(), start(fields={"cache_salt": "salt"})
        plain.wait()
        ours.wait()
        assert plain.reuse("one two") == {}
        assert ours.reuse("one two") == {"reused_tokens": 2, "recomputed_tokens": 1}

    @pytest.mark.parametrize(("trouble", "complaint"), [("refuse", "no cheese"), ("silent", "without a token")])
    def test_an_answer_that_is_none_is_an_error(
        self, start: Callable[..., VllmServer], trouble: str, complaint: str
    ) -> None:
        server = start("--trouble", trouble)
        server.wait()
        with pytest.raises(ServerError, match=complaint):
            server.ask(["a"])

    def test_one_that_does_not_start_says_why(self, start: Callable[..., VllmServer], tmp_path: Path) -> None:
        with pytest.raises(ServerError, match="exit code 3: ValueError: out of cheese"):
            start("--trouble", "no-start").wait()
        with pytest.raises(ServerError, match=r"did not answer within 1 s; see 1\.out"):
            start("--trouble", "not-ready", timeout_s=1).wait()
        with pytest.raises(ServerError, match="cannot be started"):
            VllmServer([str(tmp_path / "absent")], {}, 1, tmp_path / "absent.out", {}, 1, 1)

    def test_its_children_end_with_it(self, start: Callable[..., VllmServer]) -> None:
        server = start()
        server.wait()
        (child,) = psutil.Process(server._process.pid).children()
        server.close()
        deadline = time.monotonic() + 10
        while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
        with pytest.raises(ServerError):
            server.ask(["a"])


class FakeServer:
    """Answers in the given time, and fails at one of its requests, if it is to."""

    def __init__(self, name: str, log: list[str], ttft_s: float, fails_at: int = 99, first: str = "a") -> None:
        self._name, self._log, self._ttft_s, self._fails_at, self._first = name, log, ttft_s, fails_at, first
        self._asked = 0

    def ask(self, prompts: Sequence[str]) -> Burst:
        self._log.append(self._name)
        self._asked += 1
        if self._asked == self._fails_at:
            raise ServerError("out of cheese")
        answers = [
            Answer(self._ttft_s * number, 10.0, (self._first, "b"), 100, None if self._name == REFERENCE else 64, 5)
            for number, _ in enumerate(prompts, start=1)
        ]
        return Burst(answers, 10.0, 20.0)

    def reuse(self, prompt: str) -> Mapping[str, int]:
        return {"reused_tokens": 60, "recomputed_tokens": 4} if self._name == "ours" else {}


@pytest.fixture
def measured(rounds: list[Round]) -> tuple[Results, list[str]]:
    log: list[str] = []
    servers = {
        REFERENCE: FakeServer(REFERENCE, log, 2.0),
        "ours": FakeServer("ours", log, 0.5, first="other"),
        "fails": FakeServer("fails", log, 1.0, fails_at=3),
    }
    return measure(servers, rounds, REFERENCE), log


class TestTurns:
    def test_the_order_rotates_and_one_that_fails_is_left_out(self, measured: tuple[Results, list[str]]) -> None:
        results, log = measured
        orders = [REFERENCE, "ours", "fails"]
        # Three turns of the warm-up were without `ask`, so the first is in the order of the beginning again.
        assert log[:9] == [*orders, *orders[1:], *orders[:1], *orders[2:], *orders[:2]]
        assert log.count("fails") == 3 and log.count("ours") == 3 * len(CASES)
        assert results.errors == {"fails": "repeat, round 1, 1 client, 1024 tokens: out of cheese"}

    def test_what_was_answered_before_is_kept(self, measured: tuple[Results, list[str]]) -> None:
        samples = measured[0].samples
        assert [one["case"] for one in samples if one["server"] == "fails"] == ["cold", "new"]
        assert [one["server"] for one in samples[:6]] == [REFERENCE, "ours", "fails"] * 2

    def test_reuse_is_told_by_the_warm_up(self, measured: tuple[Results, list[str]]) -> None:
        reuse = measured[0].reuse
        assert {case for _, _, case in reuse} == set(CASES[1:])
        assert reuse["ours", 1024, "new"]["reused_tokens"] == 60 and reuse[REFERENCE, 1024, "new"] == {}

    def test_without_the_reference_nothing_is_compared(self, rounds: list[Round]) -> None:
        results = measure({"ours": FakeServer("ours", [], 1.0)}, rounds, REFERENCE)
        assert {one["gain"] for one in results.samples} == {one["same"] for one in results.samples} == {None}
        assert all(row["gain"] is None and row["same"] == "" for row in rows_of(results))

    def test_without_servers_there_are_no_results(self, rounds: list[Round]) -> None:
        assert measure({}, rounds, REFERENCE) == Results()


class TestReport:
    def row(self, results: Results, clients: int, case: str, server: str) -> Mapping[str, Any]:
        wanted = (clients, case, server)
        return next(row for row in rows_of(results) if (row["clients"], row["case"], row["server"]) == wanted)

    def test_a_row_sums_up_its_rounds(self, measured: tuple[Results, list[str]]) -> None:
        row = self.row(measured[0], 1, "new", "ours")
        assert row["ttft_s"] == [0.5, 0.5] and row["gain"] == 4.0
        assert (row["requests_per_s"], row["tokens_per_s"], row["cpus"], row["lost"]) == (0.1, 0.5, 2.0, 0)
        assert (row["prompt_tokens"], row["cached"], row["reused"], row["recomputed"]) == (100, 64, 60, 4)
        assert row["same"] == "0 of 2" and self.row(measured[0], 1, "new", REFERENCE)["same"] == "2 of 2"
        assert self.row(measured[0], 1, "new", REFERENCE)["cached"] is None

    def test_several_clients_are_summed_up_together(self, measured: tuple[Results, list[str]]) -> None:
        row = self.row(measured[0], 2, "cold", REFERENCE)
        assert row["ttft_s"] == [2.0, 4.0] and row["median_s"] == statistics.median([2.0, 4.0])
        assert (row["min_s"], row["p95_s"], row["max_s"], row["requests_per_s"]) == (2.0, 4.0, 4.0, 0.2)

    def test_a_table_for_each_load_and_case(self, measured: tuple[Results, list[str]]) -> None:
        report = SpeedReport(VIEW, {}, {}, rows_of(measured[0]))
        tables = report.tables()
        assert len(tables) == 2 * len(CASES)
        cold, again = (tables[f"1 client, 1,024 tokens of chunks: {case}"] for case in (
            "texts that nobody has met", "same prompt again"))  # fmt: skip
        assert [row[0] for row in cold[1:]] == [REFERENCE, "ours", "fails"] and "reused" not in cold[0]
        assert [row[0] for row in again[1:]] == [REFERENCE, "ours"] and "reused" in again[0]
        assert "2 clients, 1,024 tokens of chunks: same chunks, other order" in report.to_markdown()
        assert json.loads(report.to_json())["rows"][0]["server"] == REFERENCE


@pytest.fixture
def fake_run(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], None]]:
    """Runs the whole benchmark on a tiny model into `tmp_path / "out"`; one of the servers does not start."""
    model, out = tmp_path / "tiny-model", tmp_path / "out"
    random_model(max_position_embeddings=2048).save_pretrained(model)
    tokenizer.save_pretrained(model)

    def command(one: Contender, python: str, model: Path, port: int, *rest: Any) -> list[str]:
        assert list(out.glob("kv-*/**/*.safetensors"))  # all is ingested before a server looks
        trouble = "no-start" if one.name == "vllm-prefix-caching" else "none"
        return command_of_fake(tmp_path / "fake.py", port, "--log", str(tmp_path / "log"), "--trouble", trouble)

    monkeypatch.setattr(run_vllm, "command_of", command)
    options = ["--model", str(model), "--out", str(out), "--new-tokens", "2", "--threads", "1", "--loads", "1x1024x1"]
    monkeypatch.setattr(sys, "argv", ["run_vllm.py", *options])
    cores, handler, threads = os.sched_getaffinity(0), signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield run_vllm.main
    os.sched_setaffinity(0, cores)
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)


def test_the_whole_run_with_fakes(
    fake_run: Callable[[], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_run()
    out = tmp_path / "out"
    report = json.loads((out / "serving.json").read_text("utf-8"))
    assert [row["server"] for row in report["rows"]] == [REFERENCE, "rag_blend-heads"] * len(CASES)
    assert report["environment"]["vllm"] == "7" and report["environment"]["model"] == "tiny-model"
    assert "out of cheese" in report["settings"]["left out, or stopped: vllm-prefix-caching"]
    assert not list(out.glob("kv-*"))
    assert {path.name for path in out.glob("*.log")} == {f"{one.name}.log" for one in contenders(out)}
    assert "vllm-prefix-caching: it stopped with exit code 3" in capsys.readouterr().err
    assert len((tmp_path / "log").read_text("utf-8").splitlines()) == 2 * (len(CASES) + 3)


def test_a_run_that_is_ended_leaves_nothing(
    fake_run: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(servers: Mapping[str, VllmServer], *_: Any) -> Results:
        running.extend(servers.values())
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("the run went on")

    running: list[VllmServer] = []
    monkeypatch.setattr(run_vllm, "measure", ended)
    with pytest.raises(SystemExit, match="stopped"):
        fake_run()
    assert len(running) == 2 and all(server._process.poll() is not None for server in running)
    assert not list((tmp_path / "out").glob("kv-*"))


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--threads", "4096"], "--threads must be from 1 to"),
        (["--loads", "8x2048"], "a load is CLIENTSxTOKENSxROUNDS"),
    ],
)
def test_a_mistake_is_told(
    options: list[str], complaint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_vllm.py", "--model", "m", *options])
    with pytest.raises(SystemExit) as stopped:
        run_vllm.main()
    assert complaint in f"{stopped.value}{capsys.readouterr().err}"
