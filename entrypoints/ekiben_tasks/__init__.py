"""Provide the library of the tasks: the commands in ``entrypoints/`` and the recipes' own scripts are built on it.

It ships complete in every image that has a task of it. A package imports those before it in this list, never one after
it: task, data, models, distributed and generation, evaluation, training.
"""

__all__ = ["data", "distributed", "evaluation", "generation", "models", "task", "training"]
