"""What every codec must do, whichever there are; then what each of ours promises besides."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import rag_blend.codecs
from rag_blend.codecs import Codec, codec_names, codec_of
from rag_blend.codecs._affine import AffineCodec
from rag_blend.codecs.base import Shape
from rag_blend.codecs.int8 import Int8Codec
from rag_blend.codecs.raw import RawCodec

NAMES = codec_names()
LOSSLESS = [name for name in NAMES if codec_of(name).lossless]
LOSSY = [name for name in NAMES if not codec_of(name).lossless]
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES: list[Shape] = [
    (2, 1, 1, 1), (2, 3, 1, 64), (2, 2, 31, 80), (2, 1, 32, 128), (2, 3, 33, 64), (2, 2, 63, 80), (2, 1, 64, 64),
    (2, 2, 65, 128), (2, 1, 129, 5), (2, 3, 200, 64),
]  # fmt: skip


def layer_for(codec: Codec, shape: Shape, dtype: torch.dtype = torch.float16, seed: int = 0) -> torch.Tensor:
    """Keys whose channels and values whose tokens differ by a factor of up to 1000: a wrong axis ruins the small."""
    generator = torch.Generator().manual_seed(seed)
    layer = torch.randn(shape, generator=generator)
    _, heads, tokens, head_dim = shape
    layer[0] = (layer[0] + 3.0) * torch.logspace(-2, 1, heads * head_dim).view(heads, 1, head_dim)
    layer[1] *= torch.logspace(-2, 1, heads * tokens).view(heads, tokens, 1)
    return layer.to(dtype) if codec.lossless else layer.to(dtype).float()


def there_and_back(codec: Codec, layer: torch.Tensor) -> torch.Tensor:
    shape = tuple(layer.shape)
    return codec.decode(codec.encode(layer), shape, layer.dtype)


# --- every codec ---


def test_every_file_is_a_codec_of_its_name() -> None:
    files = {file.stem for file in Path(rag_blend.codecs.__file__).parent.glob("[!_]*.py")} - {"base"}
    assert files == set(NAMES) >= {"raw", "zstd", "int8", "int4"}
    assert [codec_of(name).name for name in NAMES] == list(NAMES)
    assert all(codec_of(name) is codec_of(codec_of(name)) for name in NAMES)


@pytest.mark.parametrize("name", ["", "base", "_affine", "int5", "../raw", "raw.x", "RAW"])
def test_what_names_no_codec_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown codec"):
        codec_of(name)


def test_an_object_may_be_given_but_under_no_name_that_is_taken() -> None:
    class Mine(RawCodec):
        name = "mine"

    class Impostor(RawCodec):
        name = "int8"

    mine = Mine()
    assert codec_of(mine) is mine
    assert isinstance(codec_of(Int8Codec()), Int8Codec)
    with pytest.raises(ValueError, match="another codec"):
        codec_of(Impostor())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_and_layers_are_as_promised(name: str, shape: Shape, dtype: torch.dtype) -> None:
    codec = codec_of(name)
    layer = layer_for(codec, shape, dtype)
    given = layer.clone()
    data = codec.encode(layer)
    assert data.dtype == torch.uint8 and data.ndim == 1 and data.is_contiguous()
    assert len(data) in codec.sizes(shape, layer.dtype)
    assert torch.equal(data, codec.encode(layer)) and torch.equal(layer, given)
    kept = data.clone()
    decoded = codec.decode(data, shape, layer.dtype)
    assert decoded.shape == shape and decoded.dtype == layer.dtype
    assert torch.equal(data, kept)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_is_never_much_larger_than_its_bytes(name: str) -> None:
    """What a header says decides how much is allocated, so the bytes that are there must bound it."""
    codec = codec_of(name)
    for shape in SHAPES:
        for dtype in DTYPES:
            sizes = codec.sizes(shape, dtype)
            assert not sizes or torch.Size(shape).numel() * dtype.itemsize <= 8 * sizes.start
    huge = codec.sizes((2, 2**40, 24, 2**40), torch.float32)
    assert huge.start > 2**64 and 10**9 not in huge


@pytest.mark.parametrize("name", NAMES)
def test_any_bytes_are_a_layer_or_an_error(name: str) -> None:
    codec = codec_of(name)
    shape: Shape = (2, 2, 33, 8)
    layer = layer_for(codec, shape)
    good = codec.encode(layer)
    generator = torch.Generator().manual_seed(1)
    for number in range(200):
        data = good.clone()
        if number % 2:
            at = int(torch.randint(len(data), (1,), generator=generator))
            data[at:] = torch.randint(0, 256, (len(data) - at,), generator=generator)
        else:
            data[int(torch.randint(len(data), (1,), generator=generator))] ^= 1 << number % 8
        try:
            decoded = codec.decode(data, shape, layer.dtype)
        except ValueError:
            continue
        assert decoded.shape == shape and decoded.dtype == layer.dtype


# --- lossless ones ---


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_is_bit_for_bit(name: str, shape: Shape, dtype: torch.dtype) -> None:
    codec = codec_of(name)
    layer = layer_for(codec, shape, dtype)
    assert torch.equal(there_and_back(codec, layer).view(torch.uint8), layer.view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LOSSLESS)
def test_lossless_keeps_what_is_rare(name: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    values = [0.0, -0.0, info.max, info.min, info.tiny, info.smallest_normal / 4, -info.eps, 1.0]
    layer = torch.tensor(values, dtype=dtype).repeat(2, 2, 40, 1)
    for one in (layer, torch.zeros_like(layer)):
        assert torch.equal(there_and_back(codec_of(name), one).view(torch.uint8), one.view(torch.uint8))


# --- lossy ones ---


def test_lossy_codecs_are_made_of_numbers_and_scales() -> None:
    assert all(isinstance(codec_of(name), AffineCodec) for name in LOSSY)


def bounds(codec: AffineCodec, layer: torch.Tensor) -> torch.Tensor:
    """How far each value may be off: half a step of its group, worked out value by value."""
    bound = torch.empty_like(layer)
    for side, axis in ((0, 1), (1, 2)):
        for start in range(0, layer.shape[axis + 1], codec.group):
            group = layer[side].narrow(axis, start, min(codec.group, layer.shape[axis + 1] - start))
            low, high = group.amin(axis, keepdim=True), group.amax(axis, keepdim=True)
            step = (high - low + 2.0**-9 * low.abs()) * 1.002 / (2**codec.bits - 1) + 2.0**-23
            bound[side].narrow(axis, start, group.shape[axis]).copy_((step / 2).expand_as(group))
    return bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LOSSY)
def test_no_value_is_off_by_more_than_half_a_step(name: str, shape: Shape, dtype: torch.dtype) -> None:
    codec = codec_of(name)
    assert isinstance(codec, AffineCodec)
    layer = layer_for(codec, shape, dtype)
    off = (there_and_back(codec, layer) - layer).abs()
    assert (off <= bounds(codec, layer)).all()


@pytest.mark.parametrize(("name", "error"), [("int8", 0.009), ("int4", 0.15)])
def test_each_channel_of_keys_and_each_token_of_values_is_kept_by_itself(name: str, error: float) -> None:
    layer = layer_for(codec_of(name), (2, 3, 200, 64))
    off = there_and_back(codec_of(name), layer) - layer
    for side, over in ((0, 1), (1, 2)):
        spread = (layer[side] - layer[side].mean(over, keepdim=True)).norm(dim=over)
        assert (off[side].norm(dim=over) / spread).max() < error


@pytest.mark.parametrize("name", LOSSY)
def test_an_outlier_spoils_only_its_own_group(name: str) -> None:
    codec = codec_of(name)
    layer = torch.randn(2, 2, 150, 64, generator=torch.Generator().manual_seed(0))
    before = there_and_back(codec, layer)
    outlier = layer.clone()
    outlier[0, 1, :, 7] *= 10_000.0
    outlier[1, 1, 20] *= 10_000.0
    after = there_and_back(codec, outlier)
    same = (after == before).flatten()
    touched = torch.zeros_like(layer, dtype=torch.bool)
    touched[0, 1, :, 7] = touched[1, 1, 20] = True
    assert same[~touched.flatten()].all()
    assert ((after - outlier).abs() / 10_000.0 <= (before - layer).abs().max() + 0.01)[touched].all()


@pytest.mark.parametrize("name", LOSSY)
def test_an_offset_costs_little(name: str) -> None:
    """Some models' keys have channels that are far from 0 and hardly vary; float16 alone would round them by 0.25."""
    layer = torch.randn(2, 1, 64, 64, generator=torch.Generator().manual_seed(0))
    layer[0] += 600.0
    codec = codec_of(name)
    assert isinstance(codec, AffineCodec)
    off = (there_and_back(codec, layer) - layer).abs()
    assert (off <= bounds(codec, layer)).all()
    assert off[0].max() < {"int8": 0.02, "int4": 0.25}[name]


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.3, 1e-7, 65_000.0, -65_000.0])
def test_what_does_not_vary_comes_back(name: str, value: float) -> None:
    layer = torch.full((2, 2, 70, 64), value)
    decoded = there_and_back(codec_of(name), layer)
    assert ((decoded - layer).abs() <= abs(value) * 1e-4 + 2.0**-25).all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e9, -1e9, 1e38])
@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("name", LOSSY)
def test_what_has_no_finite_scale_is_refused(name: str, side: int, bad: float) -> None:
    layer = torch.randn(2, 2, 70, 64)
    layer[side, 1, 66, 3] = bad
    with pytest.raises(ValueError, match="too large"):
        codec_of(name).encode(layer)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", LOSSY)
def test_scales_that_are_not_finite_are_refused(name: str, bad: float) -> None:
    codec = codec_of(name)
    layer = torch.randn(2, 1, 5, 8)
    data = codec.encode(layer)
    num_scales = 2 * (8 + 5)  # one group for each channel of the keys, one for each token of the values
    for at in range(num_scales):
        lying = data.clone()
        lying[2 * at : 2 * at + 2] = torch.tensor([bad], dtype=torch.float16).view(torch.uint8)
        with pytest.raises(ValueError, match="finite"):
            codec.decode(lying, (2, 1, 5, 8), torch.float32)
    assert len(data) == 2 * num_scales + 80 * int(name[3:]) // 8


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_lossy_layers_are_float32_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    assert not codec_of(name).sizes((2, 1, 5, 8), dtype)


@pytest.mark.parametrize(("name", "ratio"), [("int8", 1.88), ("int4", 3.2)])
def test_how_much_is_saved(name: str, ratio: float) -> None:
    data = codec_of(name).encode(torch.randn(2, 3, 512, 64))
    assert 2 * 2 * 3 * 512 * 64 / len(data) == pytest.approx(ratio, abs=0.005)


# --- zstd ---

WORDS = 2 * 2 * 30 * 8


def frame_of(data: bytes, **options: bool) -> torch.Tensor:
    import zstandard

    frame = zstandard.ZstdCompressor(level=1, **options).compress(data)
    return torch.tensor(list(bytes(WORDS) + frame), dtype=torch.uint8)


def decode_zstd(data: torch.Tensor) -> torch.Tensor:
    return codec_of("zstd").decode(data, (2, 2, 30, 8), torch.float16)


def test_a_frame_is_read_as_it_was_written() -> None:
    assert torch.equal(decode_zstd(frame_of(b"\x3c" * WORDS)), torch.ones(2, 2, 30, 8, dtype=torch.float16))


@pytest.mark.parametrize(
    "data",
    [
        frame_of(b"\x3c" * (WORDS - 1)),
        frame_of(b"\x3c" * (WORDS + 1)),
        frame_of(b""),
        frame_of(b"\x3c" * WORDS, write_content_size=False),
        torch.cat([frame_of(b"\x3c" * WORDS), torch.zeros(1, dtype=torch.uint8)]),
        torch.cat([frame_of(b"\x3c" * WORDS), frame_of(b"\x3c" * WORDS)[WORDS:]]),
        frame_of(b"\x3c" * WORDS)[:-1],
        frame_of(b"\x3c" * WORDS)[: WORDS + 4],
        torch.zeros(WORDS + 1, dtype=torch.uint8),
        torch.zeros(2 * WORDS, dtype=torch.uint8),
    ],
    ids=["shorter", "longer", "nothing", "unsized", "trailing", "two", "cut", "magic only", "no frame", "zeros"],
)
def test_frames_that_hold_something_else_are_refused(data: torch.Tensor) -> None:
    with pytest.raises(ValueError):
        decode_zstd(data)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = frame_of(bytes(1 << 28))
    assert len(bomb) < 1 << 16
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match="268435456"):
            decode_zstd(bomb)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_exponents_are_compressed_and_mantissas_are_not() -> None:
    codec = codec_of("zstd")
    for dtype, saved in ((torch.float16, 0.1), (torch.bfloat16, 0.25)):
        layer = torch.randn(2, 3, 400, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        num_bytes = layer.numel() * 2
        assert (0.5 - saved / 2) * num_bytes < len(codec.encode(layer)) < (1 - saved) * num_bytes
    assert len(codec.encode(torch.zeros_like(layer))) > num_bytes / 2


@pytest.fixture
def without_zstandard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.delitem(sys.modules, "rag_blend.codecs.zstd", raising=False)
    rag_blend.codecs._own.cache_clear()
    yield
    rag_blend.codecs._own.cache_clear()


@pytest.mark.usefixtures("without_zstandard")
def test_a_missing_library_is_named_with_the_line_that_installs_it() -> None:
    assert "zstd" in codec_names()
    with pytest.raises(ModuleNotFoundError, match=r'pip install -e "\.\[zstd\]"'):
        codec_of("zstd")
    assert codec_of("int8").name == "int8"
