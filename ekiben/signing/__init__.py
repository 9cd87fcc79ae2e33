"""PGP signatures of images.

sif        Sign and check SIF files.
registry   Sign and check images in registries.
check      Check what a name on the command line means.
gpg        Keys, and GnuPG as a program.
"""

__all__ = ["check", "gpg", "registry", "sif"]
