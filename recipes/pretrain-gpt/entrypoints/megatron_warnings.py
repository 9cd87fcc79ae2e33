"""Silence warnings of Megatron-Core that a user can do nothing about."""

from __future__ import annotations

import warnings


def silence_warnings() -> None:
    """Silence Megatron's warnings of missing libraries, and torch's of how Megatron calls it.

    The libraries are Transformer Engine and Apex; gpt.py has what is used instead.
    """
    for category, module in ((UserWarning, r"megatron\."), (FutureWarning, r"megatron\."), (FutureWarning, r"torch\.")):
        warnings.filterwarnings("ignore", category=category, module=module)
    # The same, where a call passes through ours.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor|Please use DTensor")
