"""Where tasks run: this machine, or a cluster's jobs."""

__all__ = ["containers", "copy_local", "docker_line", "jobs", "launch", "live", "modulefile", "schedulers", "site"]
