"""Folders of images: classes, parts, colors and orientation; every fault is one line."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from hvd_train.config import TaskConfig
from hvd_train.data.catalog import open_data
from hvd_train.data.dataset import DataRequest
from hvd_train.errors import DataError
from tests.data.files import config, everything, fault, for_testing, opened, pictures


def png_of_16_bits(color):
    """One pixel. ``color``: of the PNG standard, 2: colors, 4: gray and alpha."""
    row = b"\0" + b"\x0a\x0b" * {2: 3, 4: 2}[color]
    chunks = [
        (b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, color, 0, 0, 0)),
        (b"IDAT", zlib.compress(row)),
        (b"IEND", b""),
    ]
    made = (struct.pack(">I", len(x)) + kind + x + struct.pack(">I", zlib.crc32(kind + x)) for kind, x in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGBA", 3), ("LA", 1)])
def test_imagefolder(tmp_path, mode, channels):
    pictures(tmp_path / "train", mode=mode)
    pictures(tmp_path / "val", mode=mode, n=2)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "train" / ".hidden").mkdir()
    data = opened("imagefolder", tmp_path)
    assert data.sample.input_shape == (7, 9, channels)
    inputs, labels = everything(data.train)
    assert labels.tolist() == [0] * 5 + [1] * 5
    values = np.array([0, 1, 2, 3, 4, 20, 21, 22, 23, 24]) / np.float32(255)
    assert np.allclose(inputs, values[:, None, None, None])
    assert len(data.val) == 4
    assert opened("imagefolder", tmp_path, image_size=6).sample.input_shape == (6, 6, channels)


def test_one_gray_image_makes_no_others_gray(tmp_path):
    """Collections from the web have some, and one may come first."""
    pictures(tmp_path)
    Image.new("L", (9, 7)).save(tmp_path / "cat" / "0.png")
    data = opened("imagefolder", tmp_path)
    assert data.sample.input_shape == (7, 9, 3)
    assert all(part.fetch(np.arange(len(part)))[0]["input"].shape[-1] == 3 for part in (data.train, data.val))


def test_imagefolder_split_and_jpeg(tmp_path):
    data = opened("imagefolder", pictures(tmp_path / "all", n=10, suffix="jpg"), image_size=8)
    assert (len(data.train), len(data.val)) == (16, 4)
    assert np.bincount(everything(data.val)[1]).tolist() == [2, 2]


def test_imagefolder_faults(tmp_path):
    assert "no images in CLASS/ folders" in fault("imagefolder", tmp_path)
    pictures(tmp_path / "train")
    pictures(tmp_path / "val", classes=("cat", "cow"))
    assert "unknown class cow: the training part has cat, dog" in fault("imagefolder", tmp_path)
    (tmp_path / "val" / "cow").rename(tmp_path / "val" / "dog")
    odd = tmp_path / "train" / "dog" / "3.png"
    whole = odd.read_bytes()
    odd.write_bytes(whole[:40])
    assert str(odd) in fault("imagefolder", tmp_path)
    odd.write_bytes(b"no image at all")
    assert str(odd) in fault("imagefolder", tmp_path)
    Image.new("RGB", (5, 5)).save(odd)
    assert "set data.image_size" in fault("imagefolder", tmp_path)
    Image.fromarray(np.full((7, 9), 40_000, np.uint16)).save(odd)
    assert "8 bits" in fault("imagefolder", tmp_path)
    for deep in (png_of_16_bits(2), png_of_16_bits(4), b"P6 1 1 65535\n" + bytes(range(6))):  # colors, gray and alpha
        odd.write_bytes(deep)
        assert "mode RGB" in fault("imagefolder", tmp_path) and "8 bits" in fault("imagefolder", tmp_path)
    odd.write_bytes(whole)
    train = opened("imagefolder", tmp_path, image_size=8).train
    odd.unlink()  # while training
    with pytest.raises(DataError, match=f"No such file.*{odd}"):
        train.fetch(np.arange(len(train)))


@pytest.mark.parametrize("name", ["val", "valid", "Validation", "dev"])
def test_a_validation_folder_is_taken_by_each_of_its_names(tmp_path, name):
    pictures(tmp_path / "Training", n=9)
    pictures(tmp_path / name, n=3)
    data = opened("imagefolder", tmp_path)
    assert (len(data.train), len(data.val)) == (18, 6)
    with pytest.raises(DataError, match=r"there is no part 'test'; .*there are train, val and all"):
        for_testing("imagefolder", tmp_path)


def test_a_single_class_is_refused(tmp_path):
    """Its loss would be 0 and its accuracy 1 from the first step on; mostly the path is one folder too high."""
    pictures(tmp_path / "photos", classes=("cat",))
    said = fault("imagefolder", tmp_path / "photos")
    assert "all samples are of one class, cat" in said and "one folder for each class" in said
    keys, numbers = config("imagefolder", tmp_path / "photos"), TaskConfig(loss="mse")
    assert len(open_data(keys, numbers).train)  # another loss may have a use for it


def test_a_test_folder_is_a_split_of_its_own(tmp_path):
    pictures(tmp_path / "train", n=10)
    before = opened("imagefolder", tmp_path)
    pictures(tmp_path / "test", n=3)
    data = opened("imagefolder", tmp_path)
    test = for_testing("imagefolder", tmp_path)
    assert (len(data.train), len(data.val), len(test)) == (16, 4, 6)
    assert data.fingerprint == before.fingerprint and test.fetch(np.arange(6))[1]["label"].tolist() == [0] * 3 + [1] * 3
    (tmp_path / "test" / "dog").rename(tmp_path / "test" / "cow")
    opened("imagefolder", tmp_path)  # training does not read it
    with pytest.raises(DataError, match="unknown class cow: the training part has cat, dog"):
        for_testing("imagefolder", tmp_path)


def test_folders_whose_part_is_not_known_are_refused(tmp_path):
    pictures(tmp_path / "train")
    pictures(tmp_path / "holdout")
    assert "holdout beside train: a folder of images whose part is not known" in fault("imagefolder", tmp_path)
    pictures(tmp_path / "val")
    assert f"not read in {tmp_path}: holdout" in opened("imagefolder", tmp_path).remarks
    pictures(tmp_path / "valid")
    assert "val and valid are the same part, val" in fault("imagefolder", tmp_path)
    pictures(tmp_path / "other" / "val")
    assert "val holds classes, and there is no training part" in fault("imagefolder", tmp_path / "other")
    classes = pictures(tmp_path / "vehicles", classes=("train", "car"))
    assert opened("imagefolder", classes).sample.num_classes == 2


def test_all_that_pillow_reads_is_read_and_the_rest_is_told(tmp_path):
    pictures(tmp_path, suffix="tiff", n=4)
    pictures(tmp_path, classes=("cow", "fox"), suffix="TIF", n=4)
    for name, kind in (("a.jfif", "JPEG"), ("b", "PNG"), ("c.ppm", "PPM"), ("d.0001", "JPEG"), ("e.tga", "TGA")):
        Image.new("RGB", (9, 7)).save(tmp_path / "cat" / name, kind)
    data = opened("imagefolder", tmp_path)
    assert len(data.train) + len(data.val) == 21 and data.sample.num_classes == 4 and data.remarks == []
    for name in ("a.svg", "b.svg", "notes.txt", "LICENSE", "x.npy"):
        (tmp_path / "dog" / name).write_bytes(b"<svg/>" + bytes(90))
    (tmp_path / "dog" / "more").mkdir()
    (tmp_path / "labels.csv").write_text("a")
    (tmp_path / "cow" / ".DS_Store").write_text("a")
    (note,) = opened("imagefolder", tmp_path).remarks
    assert (
        f"not read in {tmp_path}, as these are not images in class folders: " in note
        and "beside the classes: 1 .csv" in note
    )
    assert (
        all(word in note for word in ("dog: 2 .svg", "1 .txt", "1 without an ending", "1 .npy", "1 folder"))
        and "cow" not in note
    )
    for file in (tmp_path / "fox").iterdir():
        file.rename(file.with_suffix(".heic"))
        file.with_suffix(".heic").write_bytes(b"ftypheic")
    assert f"class 'fox' has no image, but 4 .heic; {tmp_path / 'fox'}; add or convert" in fault(
        "imagefolder", tmp_path
    )


def test_images_without_classes_can_be_predicted(tmp_path):
    data = opened("imagefolder", pictures(tmp_path / "a"))
    flat = pictures(tmp_path / "b", classes=("",))
    assert "no images in CLASS/ folders" in fault("imagefolder", flat)
    found = open_data(config("imagefolder", flat), request=DataRequest(data.sample, "all", labels=False)).parts["all"]
    assert len(found) == 5 and found.fetch(np.arange(5))[0]["input"].shape == (5, 7, 9, 3)


def test_gray_or_colored_is_decided_from_all_files_of_all_parts(tmp_path):
    pictures(tmp_path / "train", mode="L", n=100)
    assert opened("imagefolder", tmp_path).sample.input_shape == (7, 9, 1)
    pictures(tmp_path / "test", n=2)
    data = opened("imagefolder", tmp_path)
    assert data.sample.input_shape == (7, 9, 1)
    assert "in color, which are read as gray" in for_testing("imagefolder", tmp_path).remarks[0]
    Image.new("RGB", (9, 7), (200, 10, 10)).save(tmp_path / "train" / "cat" / "77.png")
    assert opened("imagefolder", tmp_path).sample.input_shape == (7, 9, 3)
    Image.new("L", (9, 7)).save(tmp_path / "train" / "cat" / "77.png")
    pictures(tmp_path / "val", n=1)
    assert opened("imagefolder", tmp_path).train.sample.input_shape == (7, 9, 3)


@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_photographs_stand_upright(tmp_path, suffix):
    """As EXIF tells: left and right would be half the pictures' own, and half the camera's."""
    pictures(tmp_path, suffix=suffix)
    plain = opened("imagefolder", tmp_path)
    pixels = np.zeros((16, 8, 3), np.uint8)
    pixels[:8] = 255  # lies on its side: up is left
    exif = Image.Exif()
    exif[0x0112] = 8
    for file in tmp_path.rglob(f"*.{suffix}"):
        Image.fromarray(pixels).save(file, exif=exif, quality=95)
    data = opened("imagefolder", tmp_path)
    assert data.sample.input_shape == (8, 16, 3) and data.fingerprint != plain.fingerprint
    found = everything(data.train)[0]
    assert (
        found[:, :, :7].max() < 0.1
        and found[:, :, 9:].min() > 0.9
        or found[:, :, 9:].max() < 0.1 < found[:, :, :7].min()
    )
    upright = Image.fromarray(pixels).transpose(Image.Transpose.ROTATE_90)
    assert abs(found[0] * 255 - np.asarray(upright)).max() < 20


@pytest.mark.parametrize("kind", ["RGBA", "LA", "P"])
def test_transparency_that_is_left_out_is_told(tmp_path, kind):
    """A drawing that is black on nothing is black all over: all samples were alike, without a word."""
    pictures(tmp_path, mode="RGB" if kind == "P" else kind)
    drawing = np.zeros((7, 9, 4), np.uint8)
    drawing[2:5, 2:5, 3] = 255
    for name in ("cat", "dog"):
        one = Image.fromarray(drawing, "RGBA")
        one = one.quantize(4) if kind == "P" else one.convert(kind)
        one.save(tmp_path / name / "0.png")
    (remark,) = opened("imagefolder", tmp_path).remarks
    count = {"P": 2}.get(kind, 10)
    assert remark.startswith(f"{count} images have an alpha channel, which is left out") and "cat/0.png" in remark


def test_an_alpha_channel_without_transparent_pixels_is_no_news(tmp_path):
    pictures(tmp_path)
    for path in tmp_path.glob("*/*.png"):
        Image.open(path).convert("RGBA").save(path)
    assert not opened("imagefolder", tmp_path).remarks


@pytest.mark.parametrize("suffix", ["tif", "gif", "webp", "png"])
def test_files_of_several_images_are_told(tmp_path, suffix):
    """Of a stack of slices or an animation the first image alone is a sample."""
    pictures(tmp_path)
    slices = [Image.new("RGB", (9, 7), (30 * k, 0, 0)) for k in range(3)]
    slices[0].save(tmp_path / "dog" / f"9.{suffix}", save_all=True, append_images=slices[1:])
    (remark,) = opened("imagefolder", tmp_path).remarks
    assert remark.startswith("1 file holds several images, of which the first is read") and f"dog/9.{suffix}" in remark
