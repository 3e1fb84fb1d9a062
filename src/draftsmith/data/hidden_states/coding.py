"""How hidden states become bytes: bfloat16 without loss in two thirds of its size, or float8 in a third.

What an entropy coder can save of a bfloat16 number is in its exponent and the upper bits of its mantissa. Read as one
integer these 12 bits are nearly `16 * log2|x|`, so the scales of channels and tokens come off by subtraction, and what
is left has one narrow distribution. It goes through zstd, a byte per number; sign and lower mantissa, four bits of
noise, are stored as they are.

Shapes: T rows, C = layers * width channels.
"""

from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor


_CODEC = pa.Codec("zstd", compression_level=1)  # its Huffman coder is of use; higher levels only look for repeats
_ABOVE = 80  # codes count down from five octaves above the centre, and reach eleven below it
_ESCAPE = 255  # the code of numbers out of reach, stored in full
_FLOAT8_MEAN = 10 * 2.0**-9  # where the mean size of a row lies: ten steps of float8's uniform part
_FLOAT8_MAX = torch.finfo(torch.float8_e4m3fn).max
_SUMMED = 2.0**100  # rows with larger numbers have no mean in fp32, nor room above them to round up to
_FLOAT8_VALUES = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
_BLOCK = 2**17  # numbers

Arrays = dict[str, np.ndarray]


def encode_bfloat16(states: Tensor) -> Arrays:
    """`[T, C]` bfloat16 on the CPU, any bits -> uint8 `codes` (zstd) and `rest`, uint16 `escapes` and `centres`."""
    bits = states.contiguous().view(torch.int16).numpy().view(np.uint16)
    rows, channels = bits.shape
    sample = _sizes(bits[:: max(1, rows // 1024)])
    column_means = sample.sum(0, dtype=np.int64) // max(1, len(sample))
    centres = np.concatenate([np.zeros(rows, np.uint16), column_means.astype(np.uint16)])
    codes, rest, escapes = np.empty((rows, channels), np.uint8), np.empty((rows, channels), np.uint8), []
    for block in _blocks(rows, channels):
        sizes = _sizes(bits[block])
        row_means = (sizes.sum(1, dtype=np.int64) - column_means.sum()) // max(1, channels)
        centres[block] = (row_means + _ABOVE).astype(np.uint16)
        offsets = centres[block, None] + centres[rows:] - sizes  # modulo 2**16, here and in decoding
        escapes.append(sizes[offsets >= _ESCAPE])
        codes[block] = np.minimum(offsets, _ESCAPE)
        rest[block] = bits[block] << 1 & 15 | bits[block] >> 15
    low, half = rest.ravel(), (rest.size + 1) // 2
    packed = low[:half].copy()
    packed[: low.size - half] |= low[half:] << 4
    return {
        "codes": _compressed(codes),
        "escapes": np.concatenate([np.empty(0, np.uint16), *escapes]),
        "centres": centres,
        "rest": packed,
    }


def decode_bfloat16(arrays: Arrays, channels: int) -> Tensor:
    """What [`encode_bfloat16`] was given, bit by bit.

    Raises:
        ValueError: the arrays are damaged.
    """
    centres, packed = arrays["centres"], arrays["rest"]
    rows = len(centres) - channels
    codes = _decompressed(arrays["codes"], rows * channels).reshape(rows, channels)
    rest = np.concatenate([packed & 15, packed >> 4])[: codes.size].reshape(codes.shape)
    bits = np.empty(codes.shape, np.uint16)
    used = 0
    for block in _blocks(rows, channels):
        sizes = centres[block, None] + centres[rows:]
        sizes -= codes[block]
        escaped = np.flatnonzero(codes[block] == _ESCAPE)
        sizes.ravel()[escaped] = arrays["escapes"][used : used + len(escaped)]
        used += len(escaped)
        sizes <<= 3
        sizes |= rest[block] >> 1
        signs = rest[block].astype(np.uint16)
        signs <<= 15
        np.bitwise_or(sizes, signs, out=bits[block])
    if used != len(arrays["escapes"]):
        raise ValueError(f"{used} numbers are stored in full, but {len(arrays['escapes'])} of them are there")
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def encode_float8(states: Tensor, layers: int) -> Arrays:
    """`[T, C]` -> `codes` (zstd of float8_e4m3fn) and fp32 `scales` [T, layers], one for each row of each layer.

    The mean size of a row lies where float8 has uniform steps, not its largest number at float8's largest: that takes
    a bit less per number and loses as much. (Rows with numbers above 2**100 are scaled by the largest.) Either way a
    number changes by at most 1/16 of itself or, if that is more, by half a step, 1/20 of its row's mean size.

    Raises:
        ValueError: a number is not finite.
    """
    rows, channels = states.shape
    scales, codes = torch.zeros(rows, layers), torch.zeros(rows, channels, dtype=torch.float8_e4m3fn)
    for block in _blocks(rows, channels):
        values = states[block].float().view(-1, layers, channels // layers)
        sizes = values.abs()
        largest = sizes.amax(-1)
        if not bool(largest.isfinite().all()):
            raise ValueError("the states hold numbers that are not finite, which float8 cannot store")
        scale = largest / _FLOAT8_MAX
        scale = torch.where(largest < _SUMMED, torch.maximum(sizes.mean(-1) / _FLOAT8_MEAN, scale), scale)
        scales[block] = scale.clamp_min(torch.finfo(torch.float32).tiny)
        codes[block] = (values / scales[block, :, None]).view(-1, channels).to(torch.float8_e4m3fn)
    return {"codes": _compressed(codes.view(torch.uint8).numpy()), "scales": scales.numpy()}


def decode_float8(arrays: Arrays, channels: int) -> Tensor:
    """`[T, C]` bfloat16, near what [`encode_float8`] was given.

    Raises:
        ValueError: the arrays are damaged.
    """
    scales = arrays["scales"]
    rows, layers = scales.shape
    codes = _decompressed(arrays["codes"], rows * channels).reshape(rows, layers, channels // layers)
    states = torch.empty(rows, channels, dtype=torch.bfloat16)
    for block in _blocks(rows, channels):
        values = _FLOAT8_VALUES[codes[block]]
        values *= scales[block, :, None]
        states[block] = torch.from_numpy(values.reshape(-1, channels))
    return states


def _blocks(rows: int, channels: int) -> Iterator[slice]:
    """Rows that stay in a core's cache."""
    step = max(1, _BLOCK // max(1, channels))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _sizes(bits: np.ndarray) -> np.ndarray:
    """The upper bits but for the sign: eight of the exponent, four of the mantissa."""
    return bits >> 3 & 0xFFF


def _compressed(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(_CODEC.compress(np.ascontiguousarray(array), asbytes=True), dtype=np.uint8)


def _decompressed(array: np.ndarray, size: int) -> np.ndarray:
    """Raises `ValueError` for bytes that are not `size` compressed ones."""
    try:
        return np.frombuffer(_CODEC.decompress(np.ascontiguousarray(array), size), dtype=np.uint8)
    except (OSError, pa.ArrowInvalid) as error:
        raise ValueError(f"the compressed states are damaged ({error})") from error


# storage -> what reads its arrays, and which these are
DECODERS: dict[str, tuple[Callable[[Arrays, int], Tensor], tuple[str, ...]]] = {
    "bfloat16": (decode_bfloat16, ("codes", "escapes", "centres", "rest")),
    "float8": (decode_float8, ("codes", "scales")),
}
