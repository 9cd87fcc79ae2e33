"""Jobs of a cluster: plan (the request), script (the job scripts), runs (run folders: submit, status, logs,
cancel).
"""

__all__ = ["plan", "runs", "script"]
