"""Train a reward model on preferences: it gives each answer a number, which grpo can maximise.

reward --data pairs.jsonl --output result
reward --dry-run          what would be trained on what
reward --smoke            check in seconds, offline, that this image trains
reward --gpus 4           on several GPUs of this node; on several nodes, build.py submit starts it
"""

from __future__ import annotations

from collections.abc import Sequence

import align
from align_settings import RewardSettings
from ekiben_tasks.distributed import failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `reward` and return its exit code, as align.main() does.

    arguments: the command line without the program's name; None: that of this process.
    """
    return align.main(__file__, __doc__, RewardSettings, arguments)


if __name__ == "__main__":
    failures.run(main)
