"""A plugin of pytest: changesets in the shape of a folder, too, with owners and marks that root alone can give."""

from support.changesets import SHAPES, folder

SHAPES["folder"] = folder
