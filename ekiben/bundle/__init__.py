"""Verified archives of the sources of a recipe, for machines without a network.

write   Fetch it and write it.
read    Unpack and check it, and build from it.
"""

__all__ = ["read", "write"]
