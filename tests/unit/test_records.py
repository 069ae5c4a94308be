"""Records: round trips, and refusal of unsound fields by name."""

import dataclasses
import errno
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimstart.errors import RecordError
from slimstart.io import atomic
from slimstart.lab import records
from tests.records import make

RECORD = make(epochs=5)
PLAIN = json.loads(json.dumps(dataclasses.asdict(RECORD)))


def written(content: Any, folder: Path) -> Path:
    path = folder / "record.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def changed(path: str, value: Any) -> Any:
    """A copy of the plain record with one field set: `history.0.epoch`."""
    copy = json.loads(json.dumps(PLAIN))
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
    place = copy
    for key in parents:
        place = place[key]
    place[last] = value
    return copy


def test_round_trip(tmp_path: Path) -> None:
    records.write(RECORD, tmp_path / "record.json")
    assert records.read(tmp_path / "record.json") == RECORD
    assert records.read(tmp_path) == RECORD  # a run's folder
    content = json.loads((tmp_path / "record.json").read_text())
    assert content == PLAIN | {"digest": records.digest(PLAIN)}  # plain JSON, with nothing of Python's own
    assert [path.name for path in tmp_path.iterdir()] == ["record.json"]


def test_a_changed_bit_changes_no_value(tmp_path: Path) -> None:
    path, random = tmp_path / "record.json", np.random.default_rng(0)
    records.write(RECORD, path)
    whole, refused = path.read_bytes(), 0
    for bit in random.integers(8 * len(whole), size=300):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << (bit % 8)
        path.write_bytes(content)
        try:
            found = records.read(path)
        except RecordError:
            refused += 1
        else:
            assert found == RECORD  # the bit was in a space
    assert refused > 150


def test_records_without_a_digest_are_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert records.read(written(PLAIN, tmp_path)) == RECORD
    assert not caplog.records
    for digest in (None, 7, "", "0" * 16):
        with pytest.raises(RecordError, match=r"record\.json has been changed after it was written"):
            records.read(written(PLAIN | {"digest": digest}, tmp_path))


def test_the_former_name_of_a_method_is_translated(tmp_path: Path) -> None:
    config = PLAIN["config"] | {"method": "narrow"}
    path = written(PLAIN | {"method": "narrow", "config": config}, tmp_path)
    record = records.read(path)
    assert (record.method, record.config["method"]) == ("uniform", "uniform")
    assert record.config_hash == RECORD.config_hash
    assert json.loads(path.read_text())["method"] == "narrow"


def test_whole_numbers_are_read_as_floats(tmp_path: Path) -> None:
    record = records.read(written(changed("accuracy", 93), tmp_path))
    assert record.accuracy == 93.0
    assert type(record.accuracy) is float


def test_optional_fields_may_be_left_out_or_none(tmp_path: Path) -> None:
    plain = changed("step_ms", None)
    for name in ("expected_cost", "certain", "keep_probs"):
        del plain["history"][0][name]
    record = records.read(written(plain, tmp_path))
    assert record.step_ms is None
    assert record.history[0].keep_probs is None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        # of another type
        ("accuracy", "93.1", "`accuracy` is '93.1'; it must be a finite number"),
        ("accuracy", None, "`accuracy` is None; it must be a finite number"),
        ("accuracy", True, "`accuracy` is True; it must be a finite number"),
        ("accuracy", 10**400, r"`accuracy` is 1000\d*\.\.\.\d*; it must be a finite number"),
        ("seed", 1.0, "`seed` is 1.0; it must be of type int"),
        ("seed", True, "`seed` is True; it must be of type int"),
        ("name", 5, "`name` is 5; it must be of type str"),
        ("config", [], r"`config` is \[\]; it must be of type dict"),
        ("history", {}, r"`history` is \{\}; it must be a list"),
        ("layers.0", 3, r"`layers\[0\]` is 3; it must be a table of fields"),
        ("history.2.keep_probs", [0.5] * 20, r"`history\[2\].keep_probs\[0\]` is 0.5; it must be of type int"),
        # unknown and missing
        ("colour", "red", "`colour` is unknown"),
        ("history.1.colour", "red", r"`history\[1\].colour` is unknown"),
        # out of range
        ("accuracy", 100.1, "`accuracy` is 100.1; it must be from 0 to 100"),
        ("accuracy", -1, "`accuracy` is -1.0; it must be from 0 to 100"),
        ("history.0.test_accuracy", 101, r"`history\[0\].test_accuracy` is 101.0; it must be from 0 to 100"),
        ("flops", -1, r"`flops` is -1; it must be from 0 to 1e\+30"),
        ("train_flops", 10**31, r"`train_flops` is 1000\d*.*\d*; it must be from 0 to 1e\+30"),
        ("dense_flops", 0, "`dense_flops` is 0; it must be from 1e-09"),
        ("dense_train_flops", 0, "`dense_train_flops` is 0; it must be from 1e-09"),
        ("step_ms", 0, "`step_ms` is 0.0; it must be from 1e-09"),
        ("history.0.dense_train_flops", 0, r"`history\[0\].dense_train_flops` is 0; it must be from 1e-09"),
        ("history.2.keep_probs", [-1] + [1] * 19, r"`history\[2\].keep_probs\[0\]` is -1; it must be from 0"),
        # in contradiction to each other or to the schema
        ("layers.0.width", 65, r"`layers\[0\].width` is 65; it must be at most `dense`, 64"),
        ("history.1.epoch", 1, r"`history\[1\].epoch` is 1; it must be above that of the one before, 1"),
        ("history.0.phase", "rest", r"`history\[0\].phase` is 'rest'; it must be one of search, train, finetune"),
        ("history.0.keep_probs", [1, 2], r"`history\[0\].keep_probs` has 2 bins; it must have 20"),
        ("started", "yesterday", "`started` is 'yesterday'; it must be a time by ISO 8601"),
        ("finished", "<b>", "`finished` is '<b>'; it must be a time by ISO 8601"),
        ("schema", "slimstart.record/2", "its schema is 'slimstart.record/2', this version reads 'slimstart.record/1'"),
    ],
)
def test_unsound_fields_are_refused_by_name(tmp_path: Path, path: str, value: Any, message: str) -> None:
    file = written(changed(path, value), tmp_path)
    with pytest.raises(RecordError, match=message) as caught:
        records.read(file)
    assert str(caught.value).startswith(str(file))
    assert len(str(caught.value)) < len(str(file)) + 200  # whatever the value is


NEEDED = [field.name for field in dataclasses.fields(records.Record) if field.default is dataclasses.MISSING]


@pytest.mark.parametrize("name", NEEDED)
def test_every_field_is_needed(tmp_path: Path, name: str) -> None:
    plain = {key: value for key, value in PLAIN.items() if key != name}
    with pytest.raises(RecordError, match=f"`{name}` is missing"):
        records.read(written(plain, tmp_path))


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        '{"accuracy": NaN}',
        '{"accuracy": -Infinity}',
        json.dumps(changed("config", {"lr": "LR"})).replace('"LR"', "1e999"),
        json.dumps(changed("name", "\ud800")),
        "[" * 100_000,
        "\xff\xfe",
    ],
)
def test_other_text_than_json_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "record.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(RecordError, match=r"record\.json cannot be read as JSON"):
        records.read(path)


@pytest.mark.parametrize("content", ["[1, 2]", '{"schema": null}', '{"benchmark": "step_time"}'])
def test_other_json_is_refused(tmp_path: Path, content: str) -> None:
    with pytest.raises(RecordError, match="is not a record of a run: its schema is"):
        records.read(written(content, tmp_path))


def test_missing_records_are_reported(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="the run is not finished"):
        records.read(tmp_path)
    with pytest.raises(RecordError, match="give a run's folder"):
        records.read(tmp_path / "nowhere.json")


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e31])
def test_unsound_records_cannot_be_built(value: float) -> None:
    with pytest.raises(RecordError, match="`test_loss`"):
        dataclasses.replace(RECORD, test_loss=value)


@pytest.mark.parametrize("value", [math.nan, {1, 2}])
def test_a_configuration_must_be_plain(tmp_path: Path, value: Any) -> None:
    record = dataclasses.replace(RECORD, config={"lr": value})
    with pytest.raises(RecordError, match=r"`record.config` cannot be written as JSON"):
        records.write(record, tmp_path / "record.json")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    records.write(RECORD, path)

    def full_disk(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(atomic.os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        records.write(dataclasses.replace(RECORD, accuracy=1.0), path)
    assert records.read(path) == RECORD
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_digest_depends_on_the_settings_alone() -> None:
    assert records.digest({"lr": 0.1, "epochs": 3}) == records.digest({"epochs": 3, "lr": 0.1})
    assert records.digest({"lr": 0.1, "epochs": 3}) != records.digest({"lr": 0.2, "epochs": 3})
    assert re.fullmatch("[0-9a-f]{16}", records.digest({}))


def test_the_document_names_every_field() -> None:
    text = (Path(__file__).parents[2] / "docs" / "records.md").read_text(encoding="utf-8")
    kinds = (records.Record, records.Epoch, records.Layer, records.Structure, records.Choosing, records.Candidate)
    for kind in kinds:
        section = text.split(f"## `{kind.__name__}`")[1].split("\n## ")[0]
        named = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
        assert named == {field.name for field in dataclasses.fields(kind)}
    assert records.SCHEMA in text


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("image_shape", (3, 1 << 14, 1 << 14), "`image_shape` is"),
        ("image_shape", (3, 32), "`image_shape` is"),
        ("image_shape", (0, 32, 32), "`image_shape` is"),
        ("num_classes", 1 << 40, "`num_classes` is 1099511627776; it must be at most 1,048,576"),
        ("layers", make().layers * 1000, "`layers` has 13,000 entries; it must have at most 4,096"),
    ],
)
def test_numbers_by_which_memory_is_allocated_are_bounded(field: str, value: object, message: str) -> None:
    with pytest.raises(RecordError, match=re.escape(message)):
        dataclasses.replace(make(), **{field: value})
