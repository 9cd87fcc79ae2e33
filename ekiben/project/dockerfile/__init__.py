"""A Dockerfile and its build context become a recipe with definition files.

reader       instructions, with flags, heredocs and JSON
expansion    variables, quotes and blanks of instructions
ignore       .dockerignore
pattern      patterns of it, and of COPY
base_config  what the image of FROM sets
context      files that COPY and ADD name
evaluate     the instructions, one after the other
definitions  definition files of the stages
convert      the recipe's folder
temporary    the same for the time of a build
"""

from ekiben.project.dockerfile.convert import Conversion, convert, find_dockerfile
from ekiben.project.dockerfile.temporary import dockerfile_of, temporary_recipe

__all__ = ["Conversion", "convert", "dockerfile_of", "find_dockerfile", "temporary_recipe"]
