"""Put keys at positions, and take them off again, with the model's own rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

ApplyRotary = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class Angles(NamedTuple):
    """Cosines and sines of some positions, float32, each of shape (num_tokens, rotary_dim).

    Where types of layers have frequencies of their own: (num_types, num_tokens, rotary_dim); see `Rotary.of_layer`.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def at(self, start: int, end: int) -> Angles:
        """The angles of positions `start` to `end`, as views."""
        return Angles(self.cos[..., start:end, :], self.sin[..., start:end, :])


class Rotary:
    """A model's rotary module and its family's `apply_rotary_pos_emb`, used in float32.

    Keys are stored before RoPE and rotated **once**, at their true position. Rotating stored keys by a difference
    instead is wrong for YaRN (its scale would be applied twice) and for dynamic and long RoPE (their frequencies
    depend on the prompt's length), and rounds twice.

    Args:
        module: The model's rotary embedding, called as ``module(x, position_ids)``.
        apply: The family's ``apply_rotary_pos_emb(q, k, cos, sin)``.
        layer_types: The type of each layer, if types have frequencies of their own; then the module is called as
            ``module(x, position_ids, layer_type)``.

    Attributes:
        rotates_halves: Whether the family turns pairs (i, i + rotary_dim / 2) by equal angles, so that `rotate_into`
            can do it itself; other families' own function is called.
        num_types: How many types of layers have frequencies of their own; 0: all have the same.
    """

    def __init__(self, module: torch.nn.Module, apply: ApplyRotary, layer_types: Sequence[str] = ()) -> None:
        self._module = module
        self._apply = apply
        self._types = sorted(set(layer_types))
        self.num_types = len(self._types)
        self._type_of_layer = [self._types.index(layer_type) for layer_type in layer_types]
        self.rotates_halves = self._is_half_rotation()

    def angles(self, num_tokens: int, device: torch.device) -> Angles:
        """Angles of the positions 0 to `num_tokens`, as a prompt of this length has them."""
        return self._angles_at(torch.arange(num_tokens, device=device)[None])

    def of_layer(self, layer_idx: int, angles: Angles) -> Angles:
        """The layer's own of these angles, each of shape (num_tokens, rotary_dim)."""
        if not self.num_types:
            return angles
        number = self._type_of_layer[layer_idx]
        return Angles(angles.cos[number], angles.sin[number])

    def frequencies(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """What tells whether two prompts have the same angles: those of position 1, float32, shape (num_angles,).

        Only with dynamic and long RoPE do they depend on `num_tokens`, the prompt's length.
        """
        self._reset()
        angles = self._angles_at(torch.tensor([[1, num_tokens - 1]], device=device))
        return torch.cat([side[..., 0, :].flatten() for side in angles]).cpu()

    def _angles_at(self, position_ids: torch.Tensor) -> Angles:
        """Of positions, shape (1, num_tokens)."""
        like = torch.empty(1, dtype=torch.float32, device=position_ids.device)
        if not self.num_types:
            cos, sin = self._module(like, position_ids)
            return Angles(cos[0], sin[0])
        sides = zip(*(self._module(like, position_ids, layer_type) for layer_type in self._types), strict=True)
        return Angles(*(torch.cat(side) for side in sides))

    def _reset(self) -> None:
        """Dynamic RoPE keeps the frequencies of a longer prompt before; how long, depends on transformers' version."""
        module: Any = self._module
        if getattr(module, "rope_type", None) == "dynamic":
            module.inv_freq = module.original_inv_freq.to(module.inv_freq.device)
            module.max_seq_len_cached = module.original_max_seq_len

    def same_angles(self, *lengths: int, device: torch.device) -> bool:
        """Whether prompts of these lengths have the same angles, so that rows of one are right in the others."""
        first, *others = (self.frequencies(length, device) for length in sorted(set(lengths)))
        return all(torch.equal(first, other) for other in others)

    def rotate(self, keys: torch.Tensor, angles: Angles) -> torch.Tensor:
        """Put keys at positions.

        Args:
            keys: Before RoPE, shape (batch, num_kv_heads, num_tokens, head_dim), any dtype.
            angles: Of the `num_tokens` positions.

        Returns:
            Rotated keys, float32, same shape.
        """
        keys = keys.float()
        dim = angles.cos.shape[1]
        if dim < keys.shape[-1]:  # partial rotary embedding: the rest of each head has no position
            return torch.cat([self.rotate(keys[..., :dim], angles), keys[..., dim:]], dim=-1)
        nothing = keys[:, :0]  # the family's function wants queries as well
        return self._apply(nothing, keys, angles.cos[None], angles.sin[None])[1]

    def rotate_into(self, target: torch.Tensor, keys: torch.Tensor, angles: Angles) -> None:
        """Write rotated keys to `target`, (batch, num_kv_heads, num_tokens, head_dim); see `rotate`."""
        if not self.rotates_halves:
            target.copy_(self.rotate(keys, angles))
            return
        if target.dtype != torch.float32:  # rounded once, when it is all done
            rotated = torch.empty_like(target, dtype=torch.float32)
            self.rotate_into(rotated, keys, angles)
            target.copy_(rotated)
            return
        # The same arithmetic with fewer passes over memory: this is most of the work of loading a chunk.
        dim = angles.cos.shape[1]
        half = dim // 2
        cos, sin = angles.cos[:, :half], angles.sin[:, :half]
        keys = keys.float()
        first, second = keys[..., :half], keys[..., half:dim]
        torch.mul(first, cos, out=target[..., :half]).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=target[..., half:dim]).addcmul_(first, sin)
        target[..., dim:] = keys[..., dim:]

    def add_rotated(self, target: torch.Tensor, keys: torch.Tensor, angles: Angles) -> None:
        """Add rotated keys, or one for all tokens, to `target`, (batch, num_kv_heads, num_tokens, head_dim)."""
        if not (self.rotates_halves and target.dtype == torch.float32):
            target += self.rotate(keys.expand_as(target), angles)
            return
        dim = angles.cos.shape[1]
        first, second = keys[..., :dim].chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        target[..., :dim].addcmul_(keys[..., :dim], angles.cos).addcmul_(turned, angles.sin)
        if dim < keys.shape[-1]:
            target[..., dim:] += keys[..., dim:]

    def _is_half_rotation(self) -> bool:
        """Found out by trying."""
        generator = torch.Generator().manual_seed(0)
        keys = torch.randn(1, 1, 3, 8, generator=generator)
        angle = torch.randn(3, 4, generator=generator).repeat(1, 2)
        first, second = keys[..., :4], keys[..., 4:]
        cos, sin = angle.cos()[:, :4], angle.sin()[:, :4]
        expected = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        try:
            return torch.allclose(self.rotate(keys, Angles(angle.cos(), angle.sin())), expected, atol=1e-6)
        except (RuntimeError, TypeError):  # another kind of function; whether it works at all, the self-test tells
            return False

    def unrotate(self, keys: torch.Tensor, angles: Angles) -> torch.Tensor:
        """The inverse of `rotate`, also where the model scales its angles (YaRN)."""
        scale = angles.cos.square() + angles.sin.square()
        return self.rotate(keys, Angles(angles.cos / scale, -angles.sin / scale))
