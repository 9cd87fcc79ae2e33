"""Start and watch a task's processes on one node of a job: one launcher in the container of every node.

launch_node.py --node 1 --nodes c1,c2 --processes 4 --port 23456 --key FILE -- train --data rows.jsonl

launch_alone.py starts the only process of a job, launch_group.py those of several. Exit code 75: saved, but not
finished; start the job again.
"""

import sys
from os.path import dirname, realpath

# Import from this folder, also with isolated Python (-I); write no bytecode into a run's folder.
sys.path.insert(0, dirname(realpath(__file__)))
sys.dont_write_bytecode = True


def main(arguments: list[str]) -> int:
    """Run the launcher of one node and return the job's exit code; 2 for wrong arguments."""
    from launch_alone import parse, run

    if request := parse(arguments):
        return run(request)
    from launch_group import main as run_group  # imported here: it reads 10 MB of the image

    return run_group(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
