"""Resolve a recipe to its layers, each with a cache key.

graph         the types: ResolvedRecipe, Layer, BuildStage, StageCopy
keys          the hash of a layer's inputs
resolve       a recipe, bound to a stack, as its layers
wheel_layers  layers that install a lock file, and nothing else
base_layer    the lowest of them
apps          files and variables of SCIF apps
recipe_layer  the last of them, with the recipe's files
sources       build stages of packages without a wheel
capabilities  GPU architectures: what a stack's CUDA compiles for, and what is asked for
render        the layers as one Dockerfile or definition file
start         what a container of the finished image starts with
docker_files  compose.yaml and devcontainer.json, which start the image
"""

__all__ = [
    "apps",
    "capabilities",
    "docker_files",
    "graph",
    "keys",
    "recipe_layer",
    "render",
    "resolve",
    "sources",
    "start",
    "wheel_layers",
]
