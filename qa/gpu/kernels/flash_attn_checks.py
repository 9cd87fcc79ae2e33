"""flash-attn's functions against attention in fp32, in fp16 and bf16, forward and backward, of one length and of
several.

python3 qa/gpu/kernels/flash_attn_checks.py
"""

from __future__ import annotations

from common import run
from flash_attn import flash_attn_func, flash_attn_varlen_func
from flash_attn_common import compare_one_length, compare_several_lengths


def check_one_length() -> None:
    compare_one_length(flash_attn_func)


def check_several_lengths() -> None:
    compare_several_lengths(flash_attn_varlen_func)


if __name__ == "__main__":
    run(globals())
