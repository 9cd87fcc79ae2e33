"""Where tasks run: this machine, or a cluster's jobs."""

__all__ = ["containers", "contract", "copy_local", "jobs", "launch", "live", "modulefile", "printed", "schedulers", "site"]
