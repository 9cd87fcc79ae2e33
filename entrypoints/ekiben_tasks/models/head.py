"""Run the head of a causal model (with bias, scale and cap) on given hidden states."""

from __future__ import annotations

import copy
from typing import Any

import torch

from ekiben_tasks.models.description import find_body_path


class Tail(torch.nn.Module):  # type: ignore[misc]  # torch has no types here
    """Compute a causal model's logits from hidden states, by its own forward.

    The model is copied shallowly, its body replaced by one that returns the hidden states: whatever the family does
    with them, it is done here, too. Weights and adapters are the model's own.
    """

    def __init__(self, causal: Any) -> None:
        super().__init__()
        path = find_body_path(causal)
        self.stub = _HiddenStates(causal.get_submodule(path))
        self.causal = _replace(causal, path.split("."), self.stub)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits, ``[positions, vocabulary]``, of hidden states, ``[positions, width]``."""
        self.stub.hidden = hidden[None]
        try:
            ids = torch.zeros((1, len(hidden)), dtype=torch.int64, device=hidden.device)
            logits: torch.Tensor = self.causal(input_ids=ids, use_cache=False).logits[0]
        finally:
            self.stub.hidden = None
        return logits


class _HiddenStates(torch.nn.Module):  # type: ignore[misc]
    """Return hidden states as a body does."""

    hidden: torch.Tensor | None = None

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.bodies = (body,)  # in a tuple: its weights are not the tail's

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the body that a head reads: a multiplier, the embeddings."""
        return getattr(self.__dict__["bodies"][0], name)

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Output(self.hidden)


class _Output:
    """Stand in for transformers' outputs of a body: missing fields are None."""

    def __init__(self, hidden: torch.Tensor | None) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        return None

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


def _replace(module: Any, path: list[str], new: Any) -> Any:
    """Return a shallow copy of ``module`` with ``new`` at ``path``."""
    changed = copy.copy(module)
    changed._modules = dict(module._modules)
    changed._modules[path[0]] = new if len(path) == 1 else _replace(module._modules[path[0]], path[1:], new)
    return changed
