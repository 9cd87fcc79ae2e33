"""A folder that colleagues run images from.

publish   Write an image into it.
prune     List what is in it, and remove what nobody uses.
file      The same with a SIF file as it is.
repair    Write its missing records again.
record    The record of a version.
catalog   Write pages about it.
"""

__all__ = ["catalog", "file", "prune", "publish", "record", "repair"]
