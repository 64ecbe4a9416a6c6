"""How far one set of next-token logits is from another."""

from __future__ import annotations

import torch


def kl(full_logits: torch.Tensor, other_logits: torch.Tensor) -> torch.Tensor:
    """KL(full || other) of next-token distributions, in nats and float64.

    Args:
        full_logits: Shape (num_positions, vocab).
        other_logits: The same shape.

    Returns:
        Shape (num_positions,). A token that `full` rules out (-inf) adds nothing.

    Raises:
        ValueError: The shapes differ.
    """
    _require_alike(full_logits, other_logits)
    full = full_logits.double().log_softmax(-1)
    other = other_logits.double().log_softmax(-1)
    terms = full.exp() * (full - other)
    return terms.masked_fill(full == -torch.inf, 0.0).sum(-1).clamp_min(0.0)


def agreement(full_logits: torch.Tensor, other_logits: torch.Tensor) -> float:
    """Share of positions whose most likely token is the same, 0 to 1; both of shape (num_positions, vocab).

    Raises:
        ValueError: The shapes differ.
    """
    _require_alike(full_logits, other_logits)
    return float((full_logits.argmax(-1) == other_logits.argmax(-1)).double().mean())


def _require_alike(left: torch.Tensor, right: torch.Tensor) -> None:
    if left.shape != right.shape or left.ndim != 2 or not len(left):
        raise ValueError(f"logits of shapes {tuple(left.shape)} and {tuple(right.shape)} cannot be compared")
