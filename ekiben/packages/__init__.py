"""Sources of packages, and their locked versions.

apt          sources and versions of Debian packages; apt's settings for a script
host_config  PackageSources: the site's mirrors and indexes; what of the host is mounted into a build
git          git sources of build stages: mirrors, and repositories for a bundle
installed    which packages a file system holds
lock         write a stack's lock files
outdated     which locked packages have a newer release, or a known advisory
requirements what a file asks for, and uv, which runs none of its code
sources      source distributions of packages without a wheel: chosen, fetched, shown to the stage that builds them
"""

__all__ = ["apt", "git", "host_config", "installed", "lock", "outdated", "requirements", "sources"]
