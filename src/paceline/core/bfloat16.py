"""bfloat16, which NumPy does not have."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np


@functools.cache
def bfloat16() -> np.dtype[Any]:
    """The dtype of bfloat16: that of `ml_dtypes` where it is installed.

    Else a named field, which keeps the bits and tells them from uint16.
    """
    try:
        # It takes longer than NumPy, and few processes ever see a bfloat16.
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
        return found
    except ImportError:
        return np.dtype([("bfloat16", "<u2")])


def is_bfloat16(dtype: np.dtype[Any]) -> bool:
    """Whether that is bfloat16, as `ml_dtypes` has it or as a named field."""
    return dtype.kind == "V" and (dtype.name == "bfloat16" or dtype.names == ("bfloat16",))
