"""A folder that colleagues run images from.

publish   Write an image into it.
prune     List what is in it, and remove what nobody uses.
catalog   Write pages about it.
"""

__all__ = ["catalog", "prune", "publish"]
