"""Score a model, or an adapter on its base: the frame of such tasks, answers to SQuAD's questions, and perplexity."""

__all__ = ["frame", "perplexity", "settings", "smoke", "squad"]
