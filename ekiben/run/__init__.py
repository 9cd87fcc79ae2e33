"""Where tasks run: this machine, or a cluster's jobs."""

__all__ = [
    "app",
    "containers",
    "contract",
    "copy_local",
    "image",
    "jobs",
    "launch",
    "live",
    "modulefile",
    "printed",
    "schedulers",
    "site",
]
