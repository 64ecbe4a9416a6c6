"""What clients of a vLLM server have in common: a request's fields, an answer's figures, readable errors."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import openai

from rag_blend import RagBlendError
from rag_blend.vllm import request_fields

_NOT_HERE = (
    "a client of a vLLM server has no engine and caches nothing. Fill the server's store with a local engine on the "
    "same model (BlendEngine.ingest, a BlendLLM or ChatBlend without base_url, `rag-blend ingest`), or with vLLM "
    "itself: docs/vllm.md"
)
NO_KEY = "EMPTY"  # OpenAI's clients want one; without it they would send this process's OPENAI_API_KEY
SECRET_VARIABLE = "RAG_BLEND_SECRET"
SELECTORS = ("heads", "hkvd", "random", "none", "all")

_LOCAL_ONLY = ("engine", "storage", "prime", "engine_options", "generate_kwargs")


def no_engine(client: object, *args: object, **kwargs: object) -> NoReturn:
    """Stand in for what a local class has: say where chunks are ingested.

    Raises:
        RagBlendError: Always: a client has no engine and caches nothing.
    """
    raise RagBlendError(_NOT_HERE)


class Client(Protocol):
    """What every request of a client asks for, unless the call says otherwise."""

    namespace: str
    selector: str
    recompute_ratio: float | None
    chat_template_kwargs: dict[str, Any]


def check_arguments(name: str, given: Mapping[str, Any], url: str | None, model: object) -> None:
    """Refuse what means something for a local engine only, and a server or a model without a name.

    Args:
        name: Of the class, as the user calls it.
        given: All other arguments.
        url: The server's.
        model: The model's name there.

    Raises:
        ValueError: With what to do.
    """
    if not url or not model:
        raise ValueError(f"name the server and its model: {name}(base_url='http://host:8000/v1', model='...')")
    local = [argument for argument in _LOCAL_ONLY if given.get(argument) is not None]
    if local:
        raise ValueError(f"leave out {', '.join(local)}: with base_url, {name} has no engine, the server has its own")


def extra_fields(call: dict[str, Any], client: Client) -> dict[str, Any]:
    """Take what is ours out of a call's arguments, and return what the request's `extra_body` must have for it.

    Args:
        call: `namespace`, `selector`, `recompute_ratio` and `reuse` are removed.
        client: Has the first three for calls that do not say, and the chat template's variables.

    Raises:
        ValueError: vLLM has no such selector, or the ratio is no number.
    """
    namespace = call.pop("namespace", client.namespace)
    selector = call.pop("selector", client.selector)
    ratio = call.pop("recompute_ratio", client.recompute_ratio)
    if selector not in SELECTORS:
        raise ValueError(f"vLLM has the selectors {', '.join(SELECTORS)}, not {selector!r}")
    fields: dict[str, Any] = {}
    if client.chat_template_kwargs:
        fields["chat_template_kwargs"] = client.chat_template_kwargs
    if call.pop("reuse", True):
        fields.update(request_fields(namespace, selector, ratio, os.environ.get(SECRET_VARIABLE, "")))
    return fields


def figures(answer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a server says of a blend, ``{"rag_blend": {"reused_tokens": ..., ...}}``; nothing if it does not.

    Args:
        answer: An answer, or a piece of a streamed one, as JSON.
    """
    said = (answer.get("kv_transfer_params") or {}).get("rag_blend")
    return {} if said is None else {"rag_blend": said}


@contextmanager
def naming_server(url: str | None, model: str) -> Iterator[None]:
    """Let errors of the `openai` package say which server they are about, and what to do. Their types stay.

    Args:
        url: The server's.
        model: The model that was asked for.

    Raises:
        openai.APIError: What was raised inside.
    """
    try:
        yield
    except openai.APIError as error:
        error.message = _readable(error, url, model)
        error.args = (error.message,)
        raise


def _readable(error: openai.APIError, url: str | None, model: str) -> str:
    if isinstance(error, openai.APITimeoutError):
        return f"{url} did not answer in time; give timeout=... more seconds, or look at the server's load"
    if isinstance(error, openai.APIConnectionError):
        return f"{url} cannot be reached ({_cause(error)}); does the server run, and is base_url its address?"
    if isinstance(error, openai.NotFoundError):
        return f"{url} does not serve the model {model!r}, or is no OpenAI address, which ends in /v1. {error}"
    return f"{url} answered: {error}"


def _cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error
