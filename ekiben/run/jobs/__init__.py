"""Jobs of a cluster.

plan     what a run will be, from a request
script   the job scripts
runs     run folders: write, submit, submit again, cancel
states   the states of a run's jobs; wait for their end
logs     the logs of a run's jobs
records  run.json, and the small files that jobs write
"""

__all__ = ["logs", "plan", "records", "runs", "script", "states"]
