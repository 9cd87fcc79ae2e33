"""Implement the parallel strategies: each module is one, and its name is a value of the setting ``parallel``."""

__all__: list[str] = []
