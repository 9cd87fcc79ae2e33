"""Odds ratio preference optimisation (Hong et al. 2024): fine-tuning and preference in one, without a second model.

orpo --data pairs.jsonl --output result
orpo --dry-run          what would be trained on what
orpo --smoke            check in seconds, offline, that this image trains
orpo --gpus 4           on several GPUs of this node; on several nodes, build.py submit starts it
"""

from __future__ import annotations

from collections.abc import Sequence

import align
from align_settings import OrpoSettings
from ekiben_tasks.distributed import failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `orpo` and return its exit code, as align.main() does.

    arguments: the command line without the program's name; None: that of this process.
    """
    return align.main(__file__, __doc__, OrpoSettings, arguments)


if __name__ == "__main__":
    failures.run(main)
