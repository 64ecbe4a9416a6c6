"""Which selector and ratio treat a prompt: what the call says, what the engine was given, or what was calibrated."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Literal

from rag_blend.calibration import Verdict
from rag_blend.runner import BlendPolicy
from rag_blend.selectors import TokenSelector

logger = logging.getLogger(__name__)

Ratio = float | Literal["auto"] | None
DEFAULT_SELECTOR = "anchor"


@dataclass(frozen=True, slots=True)
class PolicyInfo:
    """How prompts are treated unless a call says otherwise. As text: one readable line.

    Attributes:
        selector: The selector's name; an object's class.
        ratio: Share of the reusable tokens that is recomputed; None is the selector's own default.
        source: ``"calibrated"``: by a verdict found in the store. ``"given"``: by the engine's arguments.
            ``"default"``: neither.
        full_prefill: Nothing is reused: the verdict says that nothing came close enough, or the model cannot blend.
    """

    selector: str
    ratio: float | None
    source: Literal["calibrated", "default", "given"]
    full_prefill: bool = False

    def __str__(self) -> str:
        if self.full_prefill:
            return f"full prefill ({self.source})"
        ratio = "" if self.ratio is None else f" at {self.ratio:.0%}"
        return f"{self.selector}{ratio} ({self.source})"


class PolicyChooser:
    """An engine's selector and ratio, and the verdict that decides where the ratio is ``"auto"``.

    Args:
        selector: See `BlendEngine`. An object is somebody's own and never gives way to a verdict.
        ratio: See `BlendEngine`.

    Raises:
        ValueError: No selector has this name, or the ratio is none.
    """

    def __init__(self, selector: str | TokenSelector, ratio: Ratio) -> None:
        self.verdict: Verdict | None = None
        self._selector = selector
        self._ratio = ratio
        _resolved(selector, ratio, True)

    @property
    def info(self) -> PolicyInfo:
        """What `resolve` says to a call that asks for nothing."""
        verdict = self._deciding(self._ratio)
        if verdict is not None:
            return PolicyInfo(verdict.selector, verdict.ratio, "calibrated", not verdict.passed)
        name = self._selector if isinstance(self._selector, str) else type(self._selector).__name__
        if self._ratio == "auto":
            return PolicyInfo(name, None, "default" if self._selector == DEFAULT_SELECTOR else "given")
        return PolicyInfo(name, self._ratio, "given")

    def adopt(self, verdict: Verdict | None) -> None:
        """Let another verdict decide, or none. One that means full prefill is warned about once."""
        known, self.verdict = self.verdict, verdict
        if self._deciding(self._ratio) and verdict is not None and verdict != known and not verdict.passed:
            logger.warning(
                "calibration (%s): nothing faster came within KL %g and agreement %g of full prefill (%s came to %.3g "
                "and %.3g, %.1f times as fast), so prompts are served by full prefill; give a recompute_ratio to blend "
                "nevertheless",
                verdict.date, verdict.target_kl, verdict.target_agreement, verdict.selector, verdict.kl,
                verdict.agreement, verdict.gain,
            )  # fmt: skip

    def resolve(self, selector: str | TokenSelector | None, ratio: Ratio, reuse: bool) -> BlendPolicy:
        """How to treat one prompt.

        Args:
            selector: The call's; None is the engine's.
            ratio: The call's; None is the engine's.
            reuse: False: plain full prefill.

        Raises:
            ValueError: No selector has this name, or the ratio is none.
        """
        ratio = self._ratio if ratio is None else ratio
        verdict = self._deciding(ratio) if selector is None else None
        if verdict is not None:
            return BlendPolicy.of(verdict.selector, verdict.ratio, reuse and verdict.passed, may_raise=True)
        return _resolved(self._selector if selector is None else selector, ratio, reuse)

    def _deciding(self, ratio: Ratio) -> Verdict | None:
        return self.verdict if ratio == "auto" and isinstance(self._selector, str) else None


def _resolved(selector: str | TokenSelector, ratio: Ratio, reuse: bool) -> BlendPolicy:
    if not isinstance(ratio, str):
        return BlendPolicy.of(selector, ratio, reuse)
    if ratio != "auto":
        raise ValueError(f"recompute_ratio must be a number between 0 and 1, 'auto' or None, got {ratio!r}")
    return BlendPolicy.of(selector, None, reuse, may_raise=True)
