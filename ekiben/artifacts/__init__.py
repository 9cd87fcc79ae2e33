"""Exports of a stored image.

export        build an image and export it in the formats asked for, with one repair of damaged blobs
make          the same with its tests: what `build`, `notebook` and the Python interface do
exporters     the formats, one module each: sif, docker, oci
load          an image loaded into an engine, for its exporter
push, pull    an image in a registry
push_file     the same of a SIF file as it is
pulled        images of registries that commands name, each pulled once
partial       a download that a later process resumes (for pull)
reproduce     build an image again, and compare every byte
recipe_state  compare an image with its recipe as it is now
"""

__all__ = [
    "export",
    "exporters",
    "load",
    "make",
    "partial",
    "pull",
    "pulled",
    "push",
    "push_file",
    "recipe_state",
    "reproduce",
]
