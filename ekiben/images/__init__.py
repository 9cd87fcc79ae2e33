"""The image that a user names: a recipe's, a SIF file, or one that colleagues published.

find_image     Find it, with what may be run in it.
published      Read what a shared folder says of its versions.
"""

from ekiben.images.find import ImageOptions, find_image, not_in_registry, registry_reference

__all__ = ["ImageOptions", "find_image", "not_in_registry", "published", "registry_reference"]
