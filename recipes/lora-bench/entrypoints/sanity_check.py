"""Is there a GPU, and does it multiply? Versions, devices, a timed product, a tiny forward pass.

sanity-check
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence

from ekiben_tasks.task import command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command `sanity-check` and return 0.

    arguments: the command line without the program's name; None: that of this process.
    """
    command.plain_parser("sanity-check", __doc__).parse_args(arguments)
    import torch

    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if has_gpu else "cpu")
    print(f"Python      {platform.python_version()}")
    print(f"torch       {torch.__version__}, CUDA {torch.version.cuda}")
    print(
        f"GPUs        {torch.cuda.device_count() if has_gpu else 'none visible: start with --nv, or docker --gpus all'}"
    )
    for index in range(torch.cuda.device_count() if has_gpu else 0):
        print(
            f"  {index}         {torch.cuda.get_device_name(index)}, {torch.cuda.mem_get_info(index)[0] / 2**30:.0f}"
            " GiB free"
        )
    print(f"multiply    1024 x 1024 in {1e3 * time_product(device):.3f} ms on {device}, the first one left out")
    model = torch.nn.Sequential(torch.nn.Linear(1024, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).to(device)
    print(f"forward     {tuple(model(torch.randn(2, 1024, device=device)).shape)}")
    return 0


def time_product(device: object) -> float:
    """Return the seconds of one product of two 1024 x 1024 matrices in fp32, the mean of ten.

    An earlier one is not counted: it loads libraries and is many times slower.
    """
    import torch

    a, b = (torch.randn(1024, 1024, device=device) for _ in range(2))
    wait = torch.cuda.synchronize if torch.cuda.is_available() else (lambda: None)
    a @ b
    wait()
    began = time.perf_counter()
    for _ in range(10):
        a @ b
    wait()
    return (time.perf_counter() - began) / 10


if __name__ == "__main__":
    command.run(main)
