"""Group relative policy optimisation (Shao et al. 2024): of sampled answers, the better ones become likelier.

grpo --data prompts.jsonl --set 'rewards=[my_reward.py:score]' --output result
grpo --dry-run          what would be trained on what
grpo --smoke            check in seconds, offline, that this image trains
grpo --gpus 4           on several GPUs of this node; on several nodes, build.py submit starts it
"""

from __future__ import annotations

from collections.abc import Sequence

import align
from align_settings import GrpoSettings
from ekiben_tasks.distributed import failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `grpo` and return its exit code, as align.main() does.

    arguments: the command line without the program's name; None: that of this process.
    """
    return align.main(__file__, __doc__, GrpoSettings, arguments)


if __name__ == "__main__":
    failures.run(main)
