"""User recipes, in folders outside this repository.

create    a new recipe's folder, from the files in template/
lock      the Python packages a recipe adds to the layers below, with hashes
sources   packages without a wheel in that lock: how each gets one
"""

__all__ = ["create", "lock", "sources"]
