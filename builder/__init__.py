"""How an image is built. Imports go downwards only: see the tree in README.md."""
