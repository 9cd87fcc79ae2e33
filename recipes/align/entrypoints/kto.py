"""Kahneman-Tversky optimisation (Ethayarajh et al. 2024): from answers that are each good or bad.

kto --data labels.jsonl --output result
kto --dry-run          what would be trained on what
kto --smoke            check in seconds, offline, that this image trains
kto --gpus 4           on several GPUs of this node; on several nodes, build.py submit starts it
"""

from __future__ import annotations

from collections.abc import Sequence

import align
from align_settings import KtoSettings
from ekiben_tasks.distributed import failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `kto` and return its exit code, as align.main() does.

    arguments: the command line without the program's name; None: that of this process.
    """
    return align.main(__file__, __doc__, KtoSettings, arguments)


if __name__ == "__main__":
    failures.run(main)
