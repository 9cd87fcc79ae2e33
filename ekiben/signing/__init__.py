"""PGP signatures of images.

sif        Sign and check SIF files.
registry   Sign and check images in registries.
check      Check what a name on the command line means.
policy     Refuse to run what no required key has signed.
gpg        Keys, and GnuPG as a program.
"""

__all__ = ["check", "gpg", "policy", "registry", "sif"]
