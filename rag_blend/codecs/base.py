"""How one layer of a stored cache becomes bytes, and a layer again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch

Shape = tuple[int, int, int, int]  # of a layer: (2, num_kv_heads, num_tokens, head_dim), keys before RoPE, then values


class Codec(ABC):
    """Writes layers down and reads them again. Has no state and no options: its name says all about its bytes.

    Entries name their codec, so one store may hold entries of several, and an engine reads them all, whatever it
    writes itself.

    Attributes:
        name: The name in the entries. Bytes that an older version could not read need another name.
        lossless: Whether a layer comes back bit for bit.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True

    @abstractmethod
    def encode(self, layer: torch.Tensor) -> torch.Tensor:
        """The bytes of a layer.

        Args:
            layer: On the CPU, contiguous, finite, of shape (2, num_kv_heads, num_tokens, head_dim): in the stored dtype
                if the codec is lossless, else as it was computed, in float32.

        Returns:
            uint8, shape (num_bytes,).

        Raises:
            ValueError: It cannot be written down.
        """

    @abstractmethod
    def decode(self, data: torch.Tensor, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """The layer again. Its bytes have proved to be those that were stored, but not who stored them.

        Args:
            data: What `encode` returned: uint8, of a length in `sizes`; must not be written to.
            shape: Of the layer.
            dtype: Of the layer.

        Returns:
            Of that shape and dtype; may share memory with `data`.

        Raises:
            ValueError: No layer was written like this. Nothing larger than the layer has been allocated.
        """

    @abstractmethod
    def sizes(self, shape: Shape, dtype: torch.dtype) -> range:
        """How many bytes such a layer may take. What is decoded is thus bounded by the bytes that are there."""
