"""How a request says that it wants stored chunks, and the salt that keeps its blocks to those who want the same.

vLLM's prefix cache takes every finished block for exact and hands it to whoever sends the same tokens with the same
`cache_salt`. A blended block is an approximation, so it must not meet a plain request. Its salt therefore names all
that decides what may be in it besides the tokens, which vLLM hashes itself: the tenant, the selector and the ratio.
Nobody else uses that salt; with a secret, nobody else can.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from dataclasses import asdict, dataclass
from typing import Any

_FORMAT = "rag_blend.vllm/1"
_PARAMETER = "rag_blend"  # our part of `kv_transfer_params`


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is to be reused, and how.

    Attributes:
        namespace: Tenant whose chunks are meant.
        selector: Name of the selector that chooses the tokens to recompute.
        recompute_ratio: Share of the reusable tokens to recompute; None is the selector's own default.
    """

    namespace: str = "default"
    selector: str = "heads"
    recompute_ratio: float | None = None

    def __post_init__(self) -> None:
        if not (isinstance(self.namespace, str) and isinstance(self.selector, str)):
            raise ValueError("namespace and selector must be strings")
        if self.recompute_ratio is not None:
            object.__setattr__(self, "recompute_ratio", float(self.recompute_ratio))  # 1 and 1.0 are one recipe

    def salt(self, secret: str = "") -> str:
        """The `cache_salt` of requests with this recipe, 64 hex digits.

        Args:
            secret: Known to the server and to those who may use it. Without it everybody can ask for every tenant.
        """
        said = json.dumps([_FORMAT, self.namespace, self.selector, self.recompute_ratio])
        return hmac.new(secret.encode(), said.encode(), hashlib.sha256).hexdigest()


def request_fields(
    namespace: str = "default",
    selector: str = "heads",
    recompute_ratio: float | None = None,
    secret: str = "",
) -> dict[str, Any]:
    """The fields that make a request of vLLM's OpenAI server reuse stored chunks: `extra_body` of an OpenAI client.

    They are the same for all prompts. With a secret, give a tenant the result, not the secret.

    Args:
        namespace: Tenant whose chunks may be used.
        selector: ``"heads"``, ``"hkvd"``, ``"random"``, ``"none"`` or ``"all"``.
        recompute_ratio: Share of the reusable tokens to recompute; None is the selector's own default.
        secret: The server's.

    Raises:
        ValueError: An argument has the wrong type.
    """
    recipe = Recipe(namespace, selector, recompute_ratio)
    return {"cache_salt": recipe.salt(secret), "kv_transfer_params": {_PARAMETER: asdict(recipe)}}


def recipe_of(kv_transfer_params: Any, cache_salt: str | None, secret: str = "") -> Recipe | None:
    """The recipe of a request, None if it asks for none.

    Raises:
        ValueError: It asks for one, but in another form than `request_fields`', or without the salt that belongs to it.
    """
    asked = kv_transfer_params.get(_PARAMETER) if isinstance(kv_transfer_params, dict) else None
    if asked is None:
        return None
    try:
        recipe = Recipe(**asked)
    except (TypeError, ValueError) as error:
        raise ValueError(f"malformed kv_transfer_params, use rag_blend.vllm.request_fields: {error}") from error
    if not hmac.compare_digest(recipe.salt(secret), str(cache_salt)):
        raise ValueError("the cache_salt is not the one that belongs to its kv_transfer_params and the server's secret")
    return recipe
