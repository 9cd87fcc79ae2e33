"""Draw lines over steps as a PNG with numpy and zlib: a plotting library would be a tenth of the image."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

COLOURS = ((31, 111, 180), (209, 73, 27), (59, 143, 59))
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 1280, 720, 130, 60, 1240, 640
SCALE = 3  # of the letters
SMOOTHED = 30  # points from which on a line is drawn smoothed too, over a twentieth of them

# 3 x 5 pixels per letter, one octal digit per row. Other characters are blank.
_LETTERS = {
    "0": "75557",
    "1": "26227",
    "2": "71747",
    "3": "71717",
    "4": "55711",
    "5": "74717",
    "6": "74757",
    "7": "71111",
    "8": "75757",
    "9": "75717",
    ".": "00002",
    "-": "00700",
    "+": "02720",
    ":": "02020",
    "_": "00007",
    "/": "11244",
    "a": "25755",
    "b": "65656",
    "c": "34443",
    "d": "65556",
    "e": "74647",
    "f": "74644",
    "g": "34553",
    "h": "55755",
    "i": "72227",
    "j": "11152",
    "k": "55655",
    "l": "44447",
    "m": "57755",
    "n": "65555",
    "o": "25552",
    "p": "65644",
    "q": "25563",
    "r": "65655",
    "s": "34216",
    "t": "72222",
    "u": "55557",
    "v": "55552",
    "w": "55775",
    "x": "55255",
    "y": "55222",
    "z": "71247",
}


def draw(file: Path, title: str, series: dict[str, list[tuple[float, float]]]) -> None:
    """Draw ``series``, name → finite (step, value) pairs, into the PNG ``file``; nothing where there are none."""
    points = [point for line in series.values() for point in line]
    if not points:
        return
    image = np.full((HEIGHT, WIDTH, 3), 255, dtype=np.uint8)
    x_high = max(x for x, _ in points) or 1.0
    y_low, y_high = min(y for _, y in points), max(y for _, y in points)
    y_high = y_high if y_high > y_low else y_low + 1
    for tick in ticks(y_low, y_high):
        y = round(BOTTOM - (BOTTOM - TOP) * (tick - y_low) / (y_high - y_low))
        image[y, LEFT:RIGHT] = 220
        _write(image, 10, y - 7, f"{tick:.6g}", (0, 0, 0))
    for tick in ticks(0, x_high):
        label, x = f"{tick:.6g}", round(LEFT + (RIGHT - LEFT) * tick / x_high)
        image[TOP:BOTTOM, x] = 235
        _write(image, x - 2 * SCALE * len(label), BOTTOM + 16, label, (0, 0, 0))
    image[BOTTOM, LEFT:RIGHT] = image[TOP:BOTTOM, LEFT] = 150
    legend = []
    for (name, line), colour in zip(series.items(), COLOURS, strict=False):
        across = [LEFT + (RIGHT - LEFT) * x / x_high for x, _ in line]
        down = [BOTTOM - (BOTTOM - TOP) * (y - y_low) / (y_high - y_low) for _, y in line]
        if len(line) < SMOOTHED:
            _trace(image, across, down, colour)
        else:
            pale = (255 - (255 - np.array(colour)) // 3).tolist()
            _trace(image, across, down, pale)
            _trace(image, across, smooth(down, len(line) / 20), colour, thickness=4)
            legend.append((f"{name}: each step", pale))
        legend.append((name if len(line) < SMOOTHED else f"{name}: smoothed", colour))
    for index, (name, colour) in enumerate(legend):
        y = TOP + 16 + 26 * index
        image[y + 6 : y + 10, RIGHT - 330 : RIGHT - 280] = colour
        _write(image, RIGHT - 265, y, name, (0, 0, 0))
    _write(image, LEFT, 20, title, (0, 0, 0))
    _write(image, (LEFT + RIGHT) // 2 - 24, BOTTOM + 46, "step", (0, 0, 0))
    file.write_bytes(_png(image))


def ticks(low: float, high: float) -> list[float]:
    """Return the multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``: 3 to 9 of them."""
    rough = (high - low) / 8
    power = 10 ** math.floor(math.log10(rough))
    step = power * next(factor for factor in (1, 2, 5, 10) if power * factor >= rough)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def smooth(values: Sequence[float], width: float) -> list[float]:
    """Return the exponential moving average over about ``width`` values, without a bias towards the first one."""
    keep, total, weight, averages = 1 - 1 / max(width, 1.0), 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + value, keep * weight + 1
        averages.append(total / weight)
    return averages


def _trace(
    image: npt.NDArray[np.uint8],
    across: Sequence[float],
    down: Sequence[float],
    colour: Sequence[int],
    thickness: int = 2,
) -> None:
    spots = list(zip(across, down, strict=True))
    for (x, y), (next_x, next_y) in zip(spots, spots[1:] or spots, strict=False):
        count = int(max(abs(next_x - x), abs(next_y - y))) + 1
        columns = np.linspace(x, next_x, count).round().astype(int)
        rows = np.linspace(y, next_y, count).round().astype(int)
        for aside in range(thickness):
            image[rows + aside, columns] = colour
    for x, y in spots if len(spots) < 30 else []:
        image[round(y) - 2 : round(y) + 3, round(x) - 2 : round(x) + 3] = colour


def _write(image: npt.NDArray[np.uint8], x: int, y: int, text: str, colour: Sequence[int]) -> None:
    for letter in text.lower():
        rows = _LETTERS.get(letter, "00000")
        shape = np.array([[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in rows], dtype=bool)
        large = shape.repeat(SCALE, 0).repeat(SCALE, 1)
        area: Any = image[y : y + large.shape[0], x : x + large.shape[1]]
        area[large[: area.shape[0], : area.shape[1]]] = colour
        x += 4 * SCALE


def _png(image: npt.NDArray[np.uint8]) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    height, width, _ = image.shape
    rows = b"".join(b"\0" + row.tobytes() for row in image)
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", zlib.compress(rows, 9)), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)
