"""A folder that colleagues run images from.

publish   Write an image into it.
prune     List what is in it, and remove what nobody uses.
repair    Write its missing records anew.
record    The record of a version.
catalog   Write pages about it.
"""

__all__ = ["catalog", "prune", "publish", "record", "repair"]
