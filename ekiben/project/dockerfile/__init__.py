"""A Dockerfile and its build context become a recipe with definition files.

reader       instructions, with flags, heredocs and JSON
expansion    variables, quotes and blanks of instructions
ignore       .dockerignore, and patterns of COPY
base_config  what the image of FROM sets
context      files that COPY and ADD name
evaluate     the instructions, one after the other
definitions  definition files of the stages
convert      the recipe's folder
"""

from ekiben.project.dockerfile.convert import Conversion, convert, find_dockerfile

__all__ = ["Conversion", "convert", "find_dockerfile"]
