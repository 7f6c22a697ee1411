"""The image decoder: bytes and paths to arrays, sizes and scales, errors, and threads that decode in parallel."""

from __future__ import annotations

import io
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparkhvd.data.columns.decoders import RowFunctions
from sparkhvd.data.columns.images import image
from sparkhvd.data.columns.ragged import Ragged
from sparkhvd.data.columns.schema import Column, DataSchema
from sparkhvd.data.dataset import Dataset
from sparkhvd.data.manifest import Manifest
from sparkhvd.data.packed import write_packed
from sparkhvd.data.reading.reader import Reader
from sparkhvd.data.store.store import Store
from sparkhvd.errors import InvalidArgumentError
from sparkhvd.estimator.saving.encoding import Archive, Decoder
from tests.harness.plans import rank_rows

pytestmark = pytest.mark.pure

Image = pytest.importorskip("PIL.Image", reason="needs Pillow")


def picture(height: int = 8, width: int = 8, mode: str = "RGB") -> Any:
    """Red grows downwards, green to the right."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[..., 0] = np.linspace(0, 255, height, dtype=np.uint8)[:, None]
    pixels[..., 1] = np.linspace(0, 255, width, dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def encoded(one: Any, form: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    one.save(buffer, form, quality=95)
    return buffer.getvalue()


def test_image_array_axes_are_channels_height_and_width() -> None:
    data = encoded(picture(4, 8))
    pixels = np.asarray(picture(4, 8))
    np.testing.assert_array_equal(image(4, 8, dtype="uint8")(data), pixels.transpose(2, 0, 1))
    found = image(4, 8)(data)
    assert (found.shape, found.dtype) == ((3, 4, 8), np.float32)
    np.testing.assert_allclose(found, pixels.transpose(2, 0, 1) / 255, atol=1e-6)
    scaled = image(4, 8, mean=(0.5, 0.4, 0.3), std=(0.2, 0.3, 0.4))(data)
    mean, std = (np.reshape(v, (3, 1, 1)) for v in ((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    np.testing.assert_allclose(scaled, (pixels.transpose(2, 0, 1) / 255 - mean) / std, atol=1e-5)


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_every_image_mode_converts_to_the_requested_channels(mode: str, channels: int) -> None:
    form = "TIFF" if mode == "CMYK" else "PNG"
    found = image(8, 8, channels, dtype="uint8")(encoded(picture(mode=mode), form))
    assert found.shape == (channels, 8, 8)


def test_fit_option_stretches_crops_or_pads_an_image() -> None:
    data = encoded(picture(16, 64))
    stretched, cropped, padded = (
        image(16, 16, dtype="uint8", fit=fit)(data) for fit in ("stretch", "crop", "pad")
    )
    assert stretched.shape == cropped.shape == padded.shape == (3, 16, 16)
    green = np.asarray(picture(16, 64))[0, :, 1]
    assert stretched[1, 0, 0] < 10
    assert stretched[1, 0, -1] > 245
    np.testing.assert_array_equal(cropped[1, 0], green[24:40])  # the middle, as it is
    assert not padded[:, :6].any()
    assert not padded[:, 10:].any()
    assert padded[1, 6:10, -1].all()
    with pytest.raises(ValueError, match=r"it has 16 x 64 pixels, and image\(fit='exact'\)"):
        image(16, 16, fit="exact")(data)
    assert image(16, 64, fit="exact")(data).shape == (3, 16, 64)


def test_reduced_jpeg_decoding_is_close_to_full_decoding() -> None:
    large = picture(800, 800)
    found = image(100, 100, dtype="uint8")(encoded(large, "JPEG"))
    whole = np.asarray(large.resize((100, 100))).transpose(2, 0, 1)
    assert np.abs(found.astype(int) - whole).mean() < 2


def test_images_are_read_from_paths_and_urls(tmp_path: Path) -> None:
    folder = tmp_path / "a b%20"
    folder.mkdir()
    (folder / "x.png").write_bytes(encoded(picture()))
    expected = image(8, 8)(encoded(picture()))
    quoted = (folder / "x.png").as_uri()
    for path in (str(folder / "x.png"), quoted, f"file:{folder}/x.png"):
        np.testing.assert_array_equal(image(8, 8)(path), expected)
    fsspec = pytest.importorskip("fsspec")
    fsspec.filesystem("memory").pipe("/pictures/x.png", encoded(picture()))
    np.testing.assert_array_equal(image(8, 8)("memory://pictures/x.png"), expected)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"channels": 2}, "channels is 2; it must be one of 1, 3, 4"),
        ({"dtype": "float64"}, "dtype is 'float64'; it must be one of 'float32', 'uint8'"),
        ({"fit": "fill"}, "fit is 'fill'; it must be one of 'stretch', 'crop', 'pad', 'exact'"),
        ({"height": 0}, "height is 0; it must be a number of pixels"),
        ({"mean": (0.5,)}, "mean has 1 numbers and the image 3 channels"),
        ({"std": 0.0}, "std is 0.0; it must be above 0"),
        ({"dtype": "uint8", "mean": 0.5}, "dtype is 'uint8', but mean and std produce floats"),
    ],
)
def test_wrong_image_decoder_arguments_are_refused(keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        image(**{"height": 8, "width": 8, **keywords})


def made(tmp_path: Path, paths: list[str]) -> tuple[Store, Manifest]:
    """Write a data set of paths."""
    store = Store.create(tmp_path / "store")
    column = Column("photo", "string", "uint8", (-1,), "string", "float32", has_decoder=True)
    texts = [np.frombuffer(path.encode(), np.uint8) for path in paths]
    values = {"photo": Ragged.from_lengths(np.concatenate(texts), np.array(list(map(len, texts))))}
    schema = DataSchema((column,), ())
    file = write_packed(store, "data/k/app/p.parquet", schema.columns, values)
    total = sum(map(len, texts))
    return store, Manifest((file,), schema, len(paths), variable_bytes={"photo": total})


def test_error_names_a_missing_or_broken_image_file(tmp_path: Path) -> None:
    broken, whole = tmp_path / ("long" * 30 + ".jpg"), tmp_path / "whole.png"
    data = encoded(picture(64, 64), "JPEG")
    whole.write_bytes(encoded(picture()))
    for content, reason in ((data[: len(data) // 2], "truncated"), (b"text", "cannot identify")):
        broken.write_bytes(content)
        expected = rf"decoders\['photo'\] failed for '{broken}': BrokenImage: its .* bytes are not a complete image: .*{reason}"
        with pytest.raises(InvalidArgumentError, match=expected):
            read_all(*made(tmp_path, [str(whole), str(broken)]))
    for path, reason in (("/nowhere/x.png", "No such file"), ("x.png", "the path is relative")):
        expected = rf"decoders\['photo'\] failed for '{path}': .*{reason}"
        with pytest.raises(InvalidArgumentError, match=expected):
            read_all(*made(tmp_path, [str(whole), path]))


def read_all(store: Store, manifest: Manifest, num_workers: int = 1, **keywords: Any) -> Any:
    decode = image(8, 8, **keywords)
    options: dict[str, Any] = {"rank": 0, "size": 1, "batch_size": 2, "shuffle": False}
    functions = RowFunctions({"photo": decode})
    with Reader(store, manifest, functions=functions, num_workers=num_workers, **options) as reader:
        return np.concatenate([batch.columns["photo"] for batch in reader.epoch(0)])


def some_broken(tmp_path: Path, count: int, broken: set[int]) -> tuple[Store, Manifest]:
    """Make images whose red is their number. The broken ones are missing, truncated or not images, in turn."""
    paths = []
    for number in range(count):
        path = tmp_path / f"{number}.png"
        data = encoded(Image.new("RGB", (8, 8), (number, 0, 0)))
        if number in broken and number % 3:
            data = data[: len(data) // 2] if number % 3 == 1 else b"no image"
        if number not in broken or number % 3:
            path.write_bytes(data)
        paths.append(str(path))
    return made(tmp_path, paths)


def test_rows_with_broken_images_are_skipped_without_moving_other_rows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = {0, 3, 4, 5, 7, 16, 17}
    store, manifest = some_broken(tmp_path, 18, broken)
    decode = image(8, 8, dtype="uint8", broken="skip")
    seen: dict[int, list[int]] = {}
    for rank in range(2):
        options: dict[str, Any] = {"rank": rank, "size": 2, "batch_size": 2, "seed": 3}
        functions = RowFunctions({"photo": decode})
        with Reader(store, manifest, functions=functions, num_workers=2, **options) as reader:
            for epoch in (0, 1, 0):
                plan, steps = reader.plan(epoch), 0
                for batch in reader.epoch(epoch):
                    found = batch.columns["photo"][:, 0, 0, 0].tolist()
                    before = plan.rows_before(rank, batch.step)
                    count = batch.rows_per_rank[rank]
                    planned = rank_rows(plan, rank)[before : before + count].tolist()
                    assert found == [n for n in planned if n not in broken]
                    assert (batch.num_rows, batch.num_broken) == (
                        len(found),
                        len(planned) - len(found),
                    )
                    assert batch.columns["photo"].shape[1:] == (3, 8, 8)
                    seen.setdefault(epoch, []).extend(found)
                    steps += 1
                assert steps == reader.num_steps == 5
    assert sorted(seen[1]) == [n for n in range(18) if n not in broken]
    lines = capfd.readouterr().err.splitlines()
    assert 5 <= len(lines) <= 10  # of each rank five at most
    assert all(
        "a row is skipped because of image(broken='skip'): photo '" in each for each in lines
    )


def test_broken_skip_hides_only_errors_of_broken_images(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="the path is relative"):
        read_all(*made(tmp_path, ["x.png"]), broken="skip")
    path = tmp_path / "large.png"
    path.write_bytes(encoded(picture(16, 16)))
    with pytest.raises(InvalidArgumentError, match="it has 16 x 16 pixels"):
        read_all(*made(tmp_path, [str(path)]), broken="skip", fit="exact")
    with pytest.raises(InvalidArgumentError, match="broken is 'drop'; it must be one of 'error'"):
        image(8, 8, broken="drop")


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_several_decoding_threads_give_the_images_of_one_thread(tmp_path: Path, dtype: str) -> None:
    paths = []
    for number in range(10):
        path = tmp_path / f"{number}.png"
        path.write_bytes(encoded(picture().rotate(number * 36)))
        paths.append(str(path))
    store, manifest = made(tmp_path, paths)
    one, several = (read_all(store, manifest, n, dtype=dtype) for n in (1, 3))
    assert (one.dtype, one.shape) == (np.dtype(dtype), (10, 3, 8, 8))
    np.testing.assert_array_equal(one, several)
    np.testing.assert_array_equal(one, np.stack([image(8, 8, dtype=dtype)(p) for p in paths]))


def test_decoding_lets_other_threads_run() -> None:
    data = encoded(picture(2000, 2000), "JPEG")
    decode = image(1500, 1500)
    is_over, turns = threading.Event(), 0
    worker = threading.Thread(target=lambda: (decode(data), is_over.set()))
    worker.start()
    while not is_over.wait(0.0005):
        turns += 1
    worker.join()
    assert turns > 5  # of some 40 ms; with the lock held they were three


def test_image_decoder_is_saved_without_code_and_described_by_options() -> None:
    one = image(8, 8, mean=(0.5, 0.5, 0.5), fit="crop")
    archive = Archive()
    stored = archive.encode("decoders", {"photo": one})
    assert not archive.code
    assert Decoder("/nowhere", None, trusted=False).decode("decoders", stored) == {"photo": one}
    assert pickle.loads(pickle.dumps(one)) == one
    assert RowFunctions({"photo": one}).describe()["decoders"]["photo"] == repr(one)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_image_is_decoded_into_the_given_memory(channels: int) -> None:
    data = encoded(picture(mode="RGBA"))
    for keywords in ({"dtype": "uint8"}, {"mean": 0.25, "std": 0.5}):
        decode = image(8, 8, channels, **keywords)  # type: ignore[arg-type]
        batch = np.ones((2, *decode.shape), decode.dtype)
        decode.into(data, batch[1])
        np.testing.assert_array_equal(batch[1], decode(data))
        np.testing.assert_array_equal(batch[0], np.ones(decode.shape))
        mode = {1: "L", 3: "RGB", 4: "RGBA"}[channels]
        pixels = np.asarray(picture(mode="RGBA").convert(mode)).reshape(8, 8, channels)
        wanted = pixels.transpose(2, 0, 1).astype("float32")
        wanted = wanted if decode.dtype == "uint8" else (wanted / 255 - 0.25) / 0.5
        np.testing.assert_allclose(decode(data), wanted, atol=1e-6)


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_loader_returns_images_as_its_decoder_makes_them(tmp_path: Path, dtype: str) -> None:
    store, manifest = some_broken(tmp_path, 6, {1})
    manifest.save(store, "data/k/app")
    decoders = {"photo": image(8, 8, dtype=dtype, broken="skip")}
    with Dataset(store, "data/k/app").loader(
        0, 1, 4, decoders=decoders, shuffle=False, columns=["photo"]
    ) as loader:
        first, last = loader
        assert loader.num_broken == 1
    assert (len(first["photo"]), len(last["photo"])) == (3, 2)
    assert first["photo"].dtype == getattr(torch, dtype)
    scale = 1 if dtype == "uint8" else 255
    red = torch.cat([first["photo"], last["photo"]])[:, 0, 0, 0] * scale
    torch.testing.assert_close(red.float(), torch.tensor([0.0, 2, 3, 4, 5]))
