"""A framework's call arguments -> arguments of `BlendEngine.generate`."""

from collections.abc import Mapping
from typing import Any

# Only meaningful when sampling; transformers warns when they are set for a greedy run.
_SAMPLING_ONLY = ("temperature", "top_p", "top_k", "min_p", "typical_p")


def merged_options(defaults: Mapping[str, Any], call: Mapping[str, Any]) -> dict[str, Any]:
    """Merge constructor defaults and per-call arguments.

    Args:
        defaults: Those of the constructor. None means "not given".
        call: Arguments of this call; they win. None means "not given".
    """
    base, given = _named(defaults), _named(call)
    merged = {**base, **given, **_sampling(base, given)}
    if merged.get("do_sample") is False:
        for name in _SAMPLING_ONLY:
            merged.pop(name, None)
    return merged


def _named(options: Mapping[str, Any]) -> dict[str, Any]:
    """Drop what was not given and translate the one name that the frameworks spell differently."""
    named = {name: value for name, value in options.items() if value is not None}
    limit = named.pop("max_tokens", None)
    if limit is not None:
        named.setdefault("max_new_tokens", limit)
    return named


def _sampling(base: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, bool]:
    """Decide `do_sample` from the temperature, which is all that the frameworks' users set.

    transformers ignores a temperature unless `do_sample` is set too, and rejects a temperature of 0. The
    explicit `do_sample` of the side that gave the temperature (or of a later one) is respected.
    """
    temperature = given.get("temperature", base.get("temperature"))
    if temperature is None:
        return {}
    if temperature == 0:
        return {"do_sample": False}
    if "do_sample" in given or ("do_sample" in base and "temperature" not in given):
        return {}
    return {"do_sample": True}
