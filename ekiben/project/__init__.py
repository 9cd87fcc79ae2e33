"""User recipes, in folders outside this repository.

add         packages that are added to a recipe, or removed
base        the packages of the base that layers stand on, read from its files
base_files  a base's file system
base_python its Python, and what that brings
create      a new recipe's folder, from the files in template/
dockerfile  a new recipe's folder, from a Dockerfile
existing    the files that make a recipe of a project's folder
explain     why requirements do not go with the layers below, and what would work
from_definition a new recipe's folder, from a definition file
lock        the Python packages a recipe adds to the layers below, with hashes
lock_bases  the images of registries that definitions name by a tag, with digests
on_base     a new recipe's folder, on a base of others
shipped     the tasks of a recipe of Ekiben's, for one on a base
sources     packages without a wheel in that lock: how each gets one
survey      what a project has to run
"""

__all__ = [
    "add",
    "base",
    "base_files",
    "base_python",
    "create",
    "dockerfile",
    "existing",
    "explain",
    "from_definition",
    "lock",
    "lock_bases",
    "on_base",
    "shipped",
    "sources",
    "survey",
]
