"""Describe the supported model families: each module is one, named as the ``model_type`` of its configuration."""

__all__: list[str] = []
