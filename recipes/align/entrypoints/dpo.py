"""Direct preference optimisation (Rafailov et al. 2023): answers that are preferred become likelier than the others.

dpo --data pairs.jsonl --output result
dpo --dry-run          what would be trained on what
dpo --smoke            check in seconds, offline, that this image trains
dpo --gpus 4           on several GPUs of this node; on several nodes, build.py submit starts it
"""

from __future__ import annotations

from collections.abc import Sequence

import align
from align_settings import DpoSettings
from ekiben_tasks.distributed import failures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `dpo` and return its exit code, as align.main() does.

    arguments: the command line without the program's name; None: that of this process.
    """
    return align.main(__file__, __doc__, DpoSettings, arguments)


if __name__ == "__main__":
    failures.run(main)
