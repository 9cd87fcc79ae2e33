"""Plan a build, build the missing layers, test the image.

image_files  images in files: OCI layouts, and what `docker save` writes
plan         what would be done for each layer, and why: Action, Options
build        obey a plan: make missing layers, name the image; import a wheel
sif_base     a SIF as a base: its own scripts as files of its layer
layer        make one layer; the folders of a job (prepare_job)
environment  evaluate a %environment that is a script
wheels       compiled wheels: what is checked of one, export and import
verify       every %test in the finished image
bases        ``Bootstrap:`` agents, a module each

stage and concurrency are of use here alone: compile one build stage, with as many jobs as fit.
"""

__all__ = ["bases", "build", "environment", "layer", "plan", "sif_base", "verify", "wheels"]
