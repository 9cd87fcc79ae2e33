"""Sources of packages, and their locked versions.

apt                sources and versions of Debian packages; apt's settings for a script
edit_definition    add Debian packages to a definition's `apt-get install` line, and remove them
edit_requirements  add packages to a list of requirements, and remove them
git                git sources of build stages: mirrors, and repositories for a bundle
host_config        PackageSources: the site's mirrors and indexes; what of the host is mounted into a build
installed          which packages a file system holds
lock               write a stack's lock files
modules            which package brings a module that an import did not have
outdated           which locked packages have a newer release, or a known advisory
requirements       what a file asks for, and uv, which runs none of its code
sources            source distributions of packages without a wheel: chosen, fetched, shown to their build stage
"""

__all__ = [
    "apt",
    "edit_definition",
    "edit_requirements",
    "git",
    "host_config",
    "installed",
    "lock",
    "modules",
    "outdated",
    "requirements",
    "sources",
]
