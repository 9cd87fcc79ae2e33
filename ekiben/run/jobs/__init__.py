"""Jobs of a cluster: plan (what is asked for), script (the job scripts), runs (run folders: submit, status, logs,
cancel).
"""

__all__ = ["plan", "runs", "script"]
