"""Definition files, recipes and stacks: read and checked.

base_packages   what the Python of a base brings: LAYER.packages.json
bases_lock      which image of a registry a definition's tag names, as locked
container       `docker:` of recipe.yaml: what a container of the Docker image starts with
definition      a definition file of images/, and the agent of its ``Bootstrap:``
definition_text its stages, headers and sections, and the values of its arguments
definition_apps SCIF apps of a definition file
definition_scripts what runs a section's script: a shebang, or `-c SHELL`
environment     %environment: a table of values, or a shell script
recipe          recipe.yaml; recipes by name or by path
task_command    the `command:` of a task
stack           stack.yaml, its lock files; stacks by name
name_confusion  packages whose name means another one to a user of GPUs; here, for resolving checks every file it copies
sources         the sources of packages without a wheel, beside a lock file
source_tree     a folder of a recipe with a Python project, as an archive
source_folders  where the files of a recipe may lie, and what the user includes beside it
"""

__all__ = [
    "base_packages",
    "bases_lock",
    "container",
    "definition",
    "definition_apps",
    "definition_scripts",
    "definition_text",
    "environment",
    "name_confusion",
    "recipe",
    "source_folders",
    "source_tree",
    "sources",
    "stack",
    "sums",
    "task_command",
]
