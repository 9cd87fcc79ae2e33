"""User recipes, in folders outside this repository.

create    a new recipe's folder, from the files in template/
lock      the Python packages a recipe adds to the layers below, with hashes
"""

__all__ = ["create", "lock"]
