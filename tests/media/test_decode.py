"""Decoded pictures are those of transformers, and files are read inside of their folder alone."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image
from transformers.image_utils import load_image

from sgla.errors import InvalidField
from sgla.media.decode import decoded, picture
from sgla.media.picture import Limits, Picture

LIMITS = Limits(1 << 20, 1 << 16)
PIXELS = bytes((i * 7919 >> 3) % 256 for i in range(6 * 4 * 4))
RGBA = Image.frombytes("RGBA", (6, 4), PIXELS)


def file(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return file(RGBA.convert("RGB"), "JPEG", exif=exif)


FILES = {
    "rgb": file(RGBA.convert("RGB"), "PNG"),
    "alpha": file(RGBA, "PNG"),
    "gray": file(RGBA.convert("L"), "PNG"),
    "gray and alpha": file(RGBA.convert("LA"), "PNG"),
    "bits": file(RGBA.convert("1"), "PNG"),
    "16 bits": file(Image.frombytes("I;16", (6, 4), PIXELS[:48]), "PNG"),
    "palette": file(RGBA.convert("P"), "PNG"),
    "transparent palette": file(RGBA.quantize(8), "PNG"),
    "cmyk": file(RGBA.convert("RGB").convert("CMYK"), "JPEG"),
    "frames": file(RGBA, "GIF", save_all=True, append_images=[RGBA.rotate(180)]),
    "webp": file(RGBA, "WEBP", lossless=True, save_all=True, append_images=[RGBA.rotate(180)]),
    "avif": file(RGBA, "AVIF"),
    "bmp": file(RGBA.convert("RGB"), "BMP"),
    "tiff": file(RGBA, "TIFF"),
    **{f"turned {orientation}": turned(orientation) for orientation in range(1, 9)},
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", FILES)
def test_pixels_are_those_of_transformers(name: str) -> None:
    image = load_image(Image.open(io.BytesIO(FILES[name])))
    assert picture(FILES[name], "file", LIMITS) == Picture.of(image.height, image.width, image.tobytes())


def test_digests_tell_pictures_apart() -> None:
    shapes = [Picture.of(2, 3, bytes(18)), Picture.of(3, 2, bytes(18)), Picture.of(2, 3, bytes(17) + b"x")]
    assert len({each.digest for each in shapes}) == 3
    assert picture(FILES["rgb"], "file", LIMITS) == picture(FILES["bmp"], "file", LIMITS)


def test_what_a_file_is_shows_in_the_file() -> None:
    """And not in what a client that does not know calls it."""
    data = file(Image.new("RGB", (3, 2), "red"), "PNG")
    url = b"data:application/octet-stream;base64," + base64.b64encode(data)
    assert picture(url, "data", LIMITS) == decoded(data, 100)
    with pytest.raises(InvalidField, match="is no picture"):
        picture(url.replace(b"octet-stream", b"pdf"), "data", LIMITS)
