"""Tiny random models behind real engines, one of which is made to say what a model that calls tools would say."""

import json
import re
import threading
from types import SimpleNamespace

import torch
from conftest import CHAT_TEMPLATE, random_model, small_tokenizer
from langchain_core.embeddings import Embeddings
from transformers import LogitsProcessor

from rag_blend import BlendEngine

# As Qwen's and other Hermes-like templates have it, boiled down.
TOOL_TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or system %}
{{- '<|im_start|>system\\n' + system }}
{%- if tools %}
{{- '\\n\\n# Tools\\n<tools>\\n' }}
{%- for tool in tools %}
{{- (tool | tojson) + '\\n' }}
{%- endfor %}
{{- '</tools>\\nAnswer with <tool_call>{"name": ..., "arguments": ...}</tool_call> to call one.' }}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in (messages[1:] if messages[0].role == 'system' else messages) %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- set said = {'name': call.function.name, 'arguments': call.function.arguments} %}
{{- '\\n<tool_call>\\n' + (said | tojson) + '\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% endfor %}" + CHAT_TEMPLATE
)
TEMPLATES = {"chat": CHAT_TEMPLATE, "tools": TOOL_TEMPLATE, "text": None}


def toy_tokenizer(kind="chat"):
    tokenizer = small_tokenizer(adds_bos=kind == "text")
    tokenizer.chat_template = TEMPLATES.get(kind, kind)
    return tokenizer


def toy_model():
    return random_model(max_position_embeddings=8192)


def toy_engine(kind="chat", **options):
    options = {"storage": None, "prime": "none", "kv_dtype": torch.float32, "prefix_cache_bytes": 0, **options}
    return BlendEngine(toy_model(), toy_tokenizer(kind), **options)


def save_toy(directory, kind="chat"):
    """A directory that `from_pretrained` takes."""
    toy_model().save_pretrained(directory)
    toy_tokenizer(kind).save_pretrained(directory)
    return str(directory)


class LetterEmbeddings(Embeddings):
    """Counts letters: equal texts are nearest, and nothing is random."""

    def embed_query(self, text):
        return [1.0 + text.lower().count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"]

    def embed_documents(self, texts):
        return [self.embed_query(text) for text in texts]


class Recorder:
    """Keeps what reaches an engine and what comes back, without changing it."""

    def __init__(self, engine, monkeypatch):
        self.calls = []
        for name in ("generate", "stream"):
            monkeypatch.setattr(engine, name, self._recording(getattr(engine, name)))

    def _recording(self, method):
        def call(prompt, **options):
            result = method(prompt, **options)
            thread = threading.current_thread().name
            self.calls.append(SimpleNamespace(prompt=prompt, result=result, thread=thread, **options))
            return result

        return call


# --- a model that calls tools


class Say(LogitsProcessor):
    """Makes the model say a text, whatever it would have said."""

    def __init__(self, tokenizer, text):
        self._left = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def __call__(self, input_ids, scores):
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self._left.pop(0)] = 0.0
        return forced


class ScriptedEngine(BlendEngine):
    """A real engine whose model answers by a script: a function from the prompt to the answer."""

    script = staticmethod(lambda prompt: "I have nothing to say.")

    def generate(self, prompt, *args, **kwargs):
        return super().generate(prompt, *args, **kwargs, logits_processor=[Say(self.tokenizer, self.script(prompt))])

    def stream(self, prompt, *args, **kwargs):
        return super().stream(prompt, *args, **kwargs, logits_processor=[Say(self.tokenizer, self.script(prompt))])


def scripted_engine(script, kind="tools"):
    engine = ScriptedEngine(
        toy_model(), toy_tokenizer(kind), storage=None, prime="none", kv_dtype=torch.float32, prefix_cache_bytes=0
    )
    engine.script = script
    return engine


def obedient(prompt):
    """What a model says that calls the tool it is asked to call, or answers in JSON when it is made to begin so."""
    answer = prompt.rpartition("<|im_start|>assistant\n")[2]
    if answer == "{":
        return '"setup": "Why do cats purr?", "punchline": "Their batteries are full."}'
    tools = [json.loads(line)["function"] for line in re.findall(r'^{"type": "function".*$', prompt, re.MULTILINE)]
    turn = prompt.rpartition("<|im_start|>assistant\n")[0].rpartition("<|im_start|>")[2]
    if not tools or (not answer and turn.startswith("tool\n")):
        return "It is done."
    named = re.search(r'"name": "(\w+)", "arguments": $', answer)
    tool = next(tool for tool in tools if not named or tool["name"] == named[1])
    whole = "<tool_call>\n" + json.dumps(
        {"name": tool["name"], "arguments": arguments_for(tool, turn)}, ensure_ascii=False
    )
    whole += "\n</tool_call>"
    assert whole.startswith(answer)
    return whole[len(answer) :]


def arguments_for(tool, turn):
    quoted = re.search(r"'(.*?)'", turn)
    return {
        name: 3 if kind.get("type") == "integer" else quoted[1] if quoted else "pirate"
        for name, kind in tool["parameters"]["properties"].items()
    }


def add_tool(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b
