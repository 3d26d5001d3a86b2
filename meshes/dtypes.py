"""Names of element types, and the fallbacks for missing rates.

Descriptions of hardware write ``bf16``, and traced models ``bfloat16``.
"""

from __future__ import annotations

from whalejax.meshes.checks import short_repr
from whalejax.meshes.errors import WhaleError


PRECISIONS = ("f32", "bf16", "f16")
"""Compute precisions of a step; ``f32`` keeps the model's own types."""

DTYPES = ("f64", "f32", "tf32", "bf16", "f16", "f8", "f4")

# Types whose rates are used for a type without a rate, in order. f64 has none, because
# all other types are several times faster.
FALLBACKS: dict[str, tuple[str, ...]] = {
    "f64": ("f64",),
    "f32": ("f32",),
    "tf32": ("tf32", "f32"),
    "bf16": ("bf16", "f16", "f32"),
    "f16": ("f16", "bf16", "f32"),
    "f8": ("f8", "bf16", "f16", "f32"),
    "f4": ("f4", "f8", "bf16", "f16", "f32"),
}

# Products of integers and booleans have the rates of other types.
_NUMPY_NAMES = {
    "float64": "f64",
    "float32": "f32",
    "bfloat16": "bf16",
    "float16": "f16",
    "complex64": "f32",
    "complex128": "f64",
    "bool": "f32",
}


def dtype_name(dtype: str) -> str:
    """Returns the short name of an element type, from a short or a NumPy name.

    Raises:
        WhaleError: ``dtype`` is no text, or no device multiplies this type.

    Example:
        >>> dtype_name("bfloat16"), dtype_name("float8_e4m3fn"), dtype_name("f32")
        ('bf16', 'f8', 'f32')
    """
    if not isinstance(dtype, str):
        raise WhaleError(
            f"dtype is {short_repr(dtype)}; expected the name of an element type, "
            f"one of {', '.join(DTYPES)}"
        )
    if dtype in FALLBACKS:
        return dtype
    if dtype in _NUMPY_NAMES:
        return _NUMPY_NAMES[dtype]
    if dtype.startswith(("float8", "float6")):
        return "f8"
    if dtype.startswith("float4"):
        return "f4"
    if dtype.startswith(("int", "uint")):
        return "f32"
    raise WhaleError(
        f"element type {short_repr(dtype)} has no FLOP/s; expected one of "
        f"{', '.join(DTYPES)} or numpy's name of a floating or integer type"
    )
