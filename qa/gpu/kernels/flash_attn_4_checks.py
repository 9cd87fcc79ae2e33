"""flash-attn 4's functions against attention in fp32, as flash_attn_checks.py; its kernels are compiled meanwhile.

python3 qa/gpu/kernels/flash_attn_4_checks.py
"""

from __future__ import annotations

import torch
from common import run
from flash_attn.cute import flash_attn_func, flash_attn_varlen_func
from flash_attn_common import compare_one_length, compare_several_lengths

SIZES = (64, 128)  # those that `train` takes it for


def check_one_length() -> None:
    compare_one_length(lambda *tensors, causal: output(flash_attn_func(*tensors, causal=causal)), SIZES)


def check_several_lengths() -> None:
    compare_several_lengths(lambda *tensors, **options: output(flash_attn_varlen_func(*tensors, **options)), SIZES)


def output(returned: tuple[torch.Tensor, torch.Tensor | None]) -> torch.Tensor:
    """Return the first of what the functions return: the second is the logarithm of the sums."""
    return returned[0]


if __name__ == "__main__":
    run(globals())
