"""The pixels of images: their kinds, sizes and depths, and how they are kept."""

import dataclasses
import shutil
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from tests.conftest import refuses
from tests.tasks.images.small import make, paint, task
from tpukit import MSHNet
from tpukit.runs.weights import serialize
from tpukit_tasks.images import data
from tpukit_tasks.images.data import read_image
from tpukit_tasks.mshnet.data import read_image as infrared_image


def test_more_pixels_than_the_disk_holds_are_refused_before_decoding(tmp_path, monkeypatch):
    paint(tmp_path)
    monkeypatch.setattr(data.shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(100, 90, 10))
    with refuses("image_size"):
        task(tmp_path, skip_bad=True).datasets()


def test_an_image_that_claims_a_billion_pixels_is_not_decoded(tmp_path, monkeypatch):
    Image.new("1", (9000, 9000)).save(tmp_path / "bomb.png")
    Image.init()  # whose plugins load a picture of their own
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    with refuses("9000x9000"):
        read_image(tmp_path / "bomb.png", 8)


def test_images_of_every_kind_become_rgb_of_the_wanted_size(tmp_path):
    grey = np.arange(256, dtype=np.uint8).reshape(16, 16)
    Image.fromarray(grey).save(tmp_path / "grey.png")
    Image.fromarray(grey).convert("P").save(tmp_path / "palette.gif")
    Image.fromarray(np.dstack([grey] * 3 + [np.full_like(grey, 255)])).save(tmp_path / "opaque.png")
    for path in tmp_path.iterdir():
        image = read_image(path, 16)
        assert image.dtype == np.uint8 and np.array_equal(image, np.dstack([grey] * 3)), path.name


def test_the_middle_of_an_image_is_kept_and_a_photo_is_turned_upright(tmp_path):
    pixels = np.zeros((8, 24, 3), np.uint8)
    pixels[:, :12] = 255
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees to the right
    for name, how in dict(wide={}, turned=dict(exif=exif)).items():
        Image.fromarray(pixels).save(tmp_path / f"{name}.png", **how)
    middle, upright = read_image(tmp_path / "wide.png", 8), read_image(tmp_path / "turned.png", 8)
    assert middle[:, :4].min() == 255 and middle[:, 4:].max() == 0
    assert upright[:4].min() == 255 and upright[4:].max() == 0


def test_a_large_jpeg_is_close_to_what_decoding_it_whole_gives(tmp_path):
    y, x = np.mgrid[:900, :1200]
    pixels = np.stack([x / 5, y / 4, 128 + 100 * np.sin((x + y) / 90)], 2).clip(0, 255).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "large.jpg", quality=95)
    with Image.open(tmp_path / "large.jpg") as whole:
        middle = whole.crop((150, 0, 1050, 900)).resize((64, 64), Image.Resampling.BICUBIC)
    assert abs(read_image(tmp_path / "large.jpg", 64) - np.asarray(middle).astype(float)).max() < 6


def test_a_changed_image_is_decoded_again(tmp_path):
    paint(tmp_path)
    before = task(tmp_path).datasets()[0].batch([0])["image"]
    Image.new("RGB", (30, 30), (255, 255, 255)).save(tmp_path / "train/blue/0.png")
    assert (task(tmp_path).datasets()[0].batch([0])["image"] != before).any()


@pytest.mark.parametrize("ending", ["tif", "png", "gif", "webp"])
def test_several_pages_or_frames_are_refused(ending, tmp_path):
    make(tmp_path, "a", "b")
    pages = [Image.new("L", (8, 8), value) for value in (60, 200)]
    pages[0].save(tmp_path / f"a/alone.{ending}")
    pages[0].save(tmp_path / f"a/pages.{ending}", save_all=True, append_images=pages[1:])
    with refuses(f"a/pages.{ending}: it has several pages or frames", "1 of ", "--skip-bad"):
        task(tmp_path).datasets()


def test_the_preview_that_a_phone_puts_into_a_jpeg_is_no_second_page(tmp_path):
    pages = [Image.new("L", (8, 8), value) for value in (60, 200)]
    pages[0].save(tmp_path / "phone.jpg", "MPO", save_all=True, append_images=pages[1:])
    assert abs(read_image(tmp_path / "phone.jpg", 8).astype(int) - 60).max() <= 2


def test_images_of_one_colour_are_told(tmp_path):
    make(tmp_path, "a", "b")
    icon = np.zeros((8, 8, 4), np.uint8)
    icon[..., 3] = 255
    Image.fromarray(icon).save(tmp_path / "b/icon.png")
    notes = "\n".join(split.notes for split in task(tmp_path).datasets())
    assert "same colour" in notes and "b/icon.png" in notes


WRITERS = {  # of a grey picture (H, W), which is transparent where `hidden` (H, W) bool says
    "rgba.png": lambda grey, hidden: Image.fromarray(np.dstack([grey] * 3 + [~hidden * np.uint8(255)])),
    "la.png": lambda grey, hidden: Image.fromarray(np.dstack([grey, ~hidden * np.uint8(255)])),
    "palette.png": lambda grey, hidden: Image.fromarray(np.where(hidden, 9, grey)).convert("P"),
    "palette.gif": lambda grey, hidden: WRITERS["palette.png"](grey, hidden),
    "l.png": lambda grey, hidden: Image.fromarray(np.where(hidden, 9, grey)),
    "rgb.png": lambda grey, hidden: Image.fromarray(np.where(hidden, 9, grey)).convert("RGB"),
    "lossless.webp": lambda grey, hidden: WRITERS["rgba.png"](grey, hidden),
    "rgba.tif": lambda grey, hidden: WRITERS["rgba.png"](grey, hidden),
}


@pytest.mark.parametrize("name", WRITERS)
def test_what_a_file_stores_below_transparency_is_neither_learned_from_nor_predicted_on(name, tmp_path):
    rng = np.random.default_rng(0)
    shown = rng.integers(10, 256, (8, 8), np.uint8)
    hidden = np.tri(8, dtype=bool)
    noise = rng.integers(10, 256, (8, 8), np.uint8)
    image = WRITERS[name](np.where(hidden, noise, shown), hidden)
    key = {"l.png": 9, "rgb.png": (9, 9, 9), "palette.png": 9, "palette.gif": 9}.get(name)
    how = dict(lossless=True) if name.endswith("webp") else dict(transparency=key) if key else {}
    make(tmp_path, "a", "b")
    image.save(tmp_path / "a" / name, **how)
    one = task(tmp_path)
    expected = np.dstack([np.where(hidden, 128, shown)] * 3)
    assert np.array_equal(read_image(tmp_path / "a" / name, 8), expected)
    assert np.array_equal(infrared_image(tmp_path / "a" / name)[0], expected[..., 0])
    batch, _ = one.read_files([tmp_path / "a" / name], None)
    assert np.array_equal(batch["image"][0], expected.transpose(2, 0, 1))
    notes = "\n".join(split.notes for split in one.datasets())
    assert notes.count("images have transparent pixels") == 1 and f"(a/{name}): laid on grey 128" in notes
    assert "transparent pixels on the value 128" in one.export_preprocessing


@pytest.mark.parametrize(
    "kind, channels, told",
    [
        ("float16", 1, "1 x 16-bit floating point"),
        ("float64", 1, "1 x 64-bit floating point"),
        ("float32", 3, "3 x 32-bit floating point"),
        ("uint64", 1, "1 x 64-bit unsigned"),
    ],
)
def test_a_tiff_of_numbers_that_are_not_read_is_refused_by_their_name(kind, channels, told, tmp_path):
    write_tiff(tmp_path / "a.tif", np.zeros((8, 8, channels), kind))
    with refuses(told, "convert it to one channel of 16-bit"):
        read_image(tmp_path / "a.tif", 8, (0, 1))


@pytest.mark.parametrize("kind", ["int8", "uint16", "int16", "uint32", "int32", "float32"])
def test_a_tiff_keeps_the_order_of_its_values_from_the_least_to_the_largest_of_its_numbers(kind, tmp_path):
    limits = np.finfo(kind) if kind == "float32" else np.iinfo(kind)
    low, high = (0, 1) if kind == "float32" else (limits.min, limits.max)
    values = np.linspace(low, high, 64).astype(kind).reshape(8, 8)
    for name in ("a/0.tif", "b/0.tif", "a/1.tif", "b/1.tif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_tiff(tmp_path / name, values[..., None])
    for image in task(tmp_path).datasets()[0].images:
        assert (np.diff(image[0].ravel().astype(int)) > 0).all() and np.ptp(image) >= 250


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_a_tiff_whose_least_value_is_white_shows_it_white(kind, tmp_path):
    limits = np.iinfo(kind)
    values = np.linspace(limits.min, limits.max, 64).astype(kind).reshape(8, 8, 1)
    for name in ("a/0.tif", "b/0.tif", "a/1.tif", "b/1.tif"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_tiff(tmp_path / name, values, white=0)
    image = task(tmp_path).datasets()[0].images[0][0].ravel().astype(int)
    assert (np.diff(image) < 0).all() and image[0] > 250 and image[-1] < 5


def write_tiff(path, pixels, white=1):
    """A TIFF of one strip, whatever its numbers are; Pillow writes only what it reads. pixels: (H, W, C).
    white: 0 if the least value of grey is white."""
    height, width, channels = pixels.shape
    bits, number = 8 * pixels.itemsize, "uif".index(pixels.dtype.kind) + 1
    end = 8 + 2 + 12 * 11 + 4  # of the header and of the tags; then the two lists
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: white if channels == 1 else 2}
    tags |= {273: end + 4 * channels, 277: channels, 278: height, 279: pixels.nbytes, 284: 1, 339: number}
    with open(path, "wb") as file:
        file.write(b"II*\0" + struct.pack("<IH", 8, len(tags)))
        for tag, value in tags.items():
            is_list = channels > 1 and tag in (258, 339)
            kind = 3 if tag in (258, 339) else 4
            place = end + 2 * channels * (tag == 339) if is_list else value
            file.write(struct.pack("<HHII", tag, kind, channels if is_list else 1, place))
        file.write(struct.pack(f"<I{channels}H{channels}H", 0, *[bits] * channels, *[number] * channels))
        file.write(pixels.tobytes())


def deep_png(path, pixels):
    """A PNG of 16 bits in each channel; Pillow writes none. pixels: (H, W, C)."""
    height, width, channels = pixels.shape
    kind = {2: 4, 3: 2, 4: 6}[channels]
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    header = struct.pack(">IIBBBBB", width, height, 16, kind, 0, 0, 0)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.write(b"\x89PNG\r\n\x1a\n")
        for name, content in ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")):
            file.write(struct.pack(">I", len(content)) + name + content)
            file.write(struct.pack(">I", zlib.crc32(name + content)))


@pytest.mark.parametrize("channels", [2, 3, 4])
def test_colours_of_16_bits_are_refused(channels, tmp_path):
    """Pillow keeps the upper 8 bits, which of counts of 12 bits are 16 levels."""
    deep_png(tmp_path / "deep.png", np.random.default_rng(0).integers(0, 2**16, (16, 16, channels)))
    with refuses("16 bits: convert it to 8 bits, or to one channel of 16"):
        read_image(tmp_path / "deep.png", 16)


def broken_tiffs(folder):
    """Two classes of three TIFFs with values from 0 to 1; two of them with other pixels, too."""
    for number in range(6):
        values = np.linspace(0, 1, 64, dtype=np.float32).reshape(8, 8)
        values[-1, -1] = 1 - number / 100
        values[0, : {2: 3, 5: 1}.get(number, 0)] = np.nan if number == 2 else np.inf
        (folder / "ab"[number % 2]).mkdir(exist_ok=True)
        Image.fromarray(values).save(folder / "ab"[number % 2] / f"{number}.tif")


def test_pixels_that_are_nan_or_infinite_are_counted_by_file_in_training_and_in_predictions(tmp_path, capsys):
    broken_tiffs(tmp_path)
    one = task(tmp_path)
    train, test = one.datasets()
    said = f"{train.notes}\n{test.notes}"
    for name, count in (("a/2.tif", 3), ("b/5.tif", 1)):
        assert f"{count} in {name}" in said
    assert "1.tif" not in said and "NaN becomes black" in said
    weights = tmp_path / "best.safetensors"
    about = dict(task=one.name) | {name: str(value) for name, value in one.metadata(train).items()}
    weights.write_bytes(b"".join(serialize({}, about)))
    for trained in (dataclasses.replace(one, weights=weights, dataset_dir=None), MSHNet(weights=weights)):
        capsys.readouterr()
        trained.read_files([tmp_path / "a/0.tif", tmp_path / "a/2.tif"], weights)
        said = capsys.readouterr().out
        assert "1 of 2 images have pixels that are NaN or infinite (3 in 2.tif)" in said
        trained.read_files([tmp_path / "a/0.tif"], weights)
        assert not capsys.readouterr().out


def test_an_image_without_any_finite_number_is_refused(tmp_path):
    broken_tiffs(tmp_path)
    Image.fromarray(np.full((8, 8), np.nan, np.float32)).save(tmp_path / "a/2.tif")
    with refuses("a/2.tif: none of its pixels is a finite number", "--skip-bad"):
        task(tmp_path).datasets()


@pytest.mark.parametrize("kind", ["uint16", "float32"])
def test_deep_grey_is_scaled_by_the_training_set_and_the_weights_keep_how(kind, tmp_path):
    """Counts around 21,000, and floats from 0 to 1, get the contrast of the same pictures in 8 bits."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (8, 8, 8))
    for number, image in enumerate(pixels):
        path = tmp_path / "ab"[number % 2] / f"{number}.tif"
        path.parent.mkdir(exist_ok=True)
        values = 21000 + image if kind == "uint16" else image / 255
        Image.fromarray(values.astype(kind)).save(path)
    one = task(tmp_path)
    train, test = one.datasets()
    for split in (train, test):
        for name, image in zip(split.names, split.images):
            expected = pixels[int(name[2])]
            assert abs(image.astype(int) - expected).max() <= 3
    assert "deeper than 8 bits" in train.notes
    kept = one.metadata(train)["grey_levels"]
    assert np.allclose(list(map(float, kept.split())), train.levels)
    weights = tmp_path / "best.safetensors"
    about = dict(task=one.name) | {name: str(value) for name, value in one.metadata(train).items()}
    weights.write_bytes(b"".join(serialize({}, about)))
    trained = dataclasses.replace(one, weights=weights, dataset_dir=None)
    batch, _ = trained.read_files([tmp_path / name for name in test.names], weights)
    assert np.array_equal(batch["image"], test.images), "a prediction sees what the evaluation does"
    assert f"{train.levels[0]:g} to {train.levels[1]:g} becomes 0 to 255" in trained.export_preprocessing
    with refuses("its grey values are", "the training set's"):
        read_image(path, 16, (train.levels[0] - 1000, train.levels[0] - 500))
    with refuses("deeper than 8 bits", "nothing says"):
        read_image(path, 16)
