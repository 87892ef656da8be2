"""A film as a small moving picture for a page.

    python mpo_continuous.py --evaluate benchmark/models/walker-walk --capture-video
    python benchmark/gif.py benchmark/models/walker-walk/evaluation.mp4 docs/img/walker.gif

Six seconds of the film, from the second on, at ten pictures a second and half its size.
"""

import sys

import imageio.v2 as imageio
from PIL import Image

PICTURES_PER_SECOND, BEGIN, SECONDS = 10, 2, 6


def pictures(film):
    """What of the film is shown, half as large, all in the colours of the first."""
    reader = imageio.get_reader(film)
    step = round(reader.get_meta_data()["fps"] / PICTURES_PER_SECOND)
    begin = BEGIN * PICTURES_PER_SECOND * step
    end = begin + SECONDS * PICTURES_PER_SECOND * step
    shown = []
    for number, frame in enumerate(reader):
        if begin <= number < end and number % step == 0:
            image = Image.fromarray(frame)
            image = image.resize((image.width // 2, image.height // 2))
            shown.append(image.quantize(64, palette=shown[0] if shown else None, dither=0))
    return shown


if __name__ == "__main__":
    if len(sys.argv) != 3:
        print("gif.py: name a film and the GIF to write.", file=sys.stderr)
        raise SystemExit(2)
    first, *others = pictures(sys.argv[1])
    pace = 1000 // PICTURES_PER_SECOND
    first.save(sys.argv[2], save_all=True, append_images=others, duration=pace, loop=0)
