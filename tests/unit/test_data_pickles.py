"""Pickles are read as plain data, and no code in them is run."""

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slimstart.errors import DataError
from slimstart.lab.data import pickles


class Call:
    """Pickled as a call of `function`."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.reduced


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
def test_plain_data_comes_back(protocol: int) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    nested = {"x": (b"\xff", None, 2.5)}
    content = {b"data": array, b"columns": np.asfortranarray(array), "labels": [1, 2], b"n": nested}
    found = pickles.read(pickle.dumps(content, protocol), "file")
    assert found.keys() == {"data", "columns", "labels", "n"}
    assert found["data"].dtype == np.uint8
    assert found["data"].tolist() == found["columns"].tolist() == array.tolist()
    assert found["labels"] == [1, 2]
    assert found["n"] == nested


def test_what_python_2_wrote_is_read() -> None:
    """Its strings are bytes, and its numpy had other names. Written out by hand, as no Python 3 writes it."""
    content = (
        b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02K\x03\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
        b"\x89U\x06abcdeftbU\x06labels](K\x07K\x09eu."
    )
    found = pickles.read(content, "file")
    assert found["data"].tolist() == [[97, 98, 99], [100, 101, 102]]
    assert found["labels"] == [7, 9]


def attacks(target: Path) -> dict[str, bytes]:
    """Each makes `target` if it runs."""
    touch, code = f"touch {target}", f'open("{target}", "w").close()'
    system = b"cbuiltins\ngetattr\n(cbuiltins\n__import__\n(S'os'\ntRS'system'\ntR"
    return {
        "os.system": pickle.dumps({"data": Call(os.system, touch)}),
        "builtins.eval": pickle.dumps({"data": Call(eval, code)}),
        "builtins.exec": pickle.dumps([Call(exec, code)]),
        "nested getattr": system + b"(S'%b'\ntR." % touch.encode(),
        "dotted name": b"\x80\x04\x8c\x08builtins\x8c\reval.__call__\x93\x8c%c%b\x85R." % (len(code), code.encode()),
        "old instance": b"(S'%b'\nios\nsystem\n." % touch.encode(),
        "through numpy": b"cnumpy\nndarray.__class__.__base__.__subclasses__\n(tR.",
        "numpy's own exec": b"cnumpy.testing\nrunstring\n(S'%b'\n}tR." % code.encode(),
        "codec": b"c_codecs\nencode\n(S'a'\nS'zlib_codec'\ntR.",
        "state of a stand-in": b"cnumpy\nndarray\n(tR}S'__class__'\nS'x'\nsb.",
        "persistent": b"Pthing\n.",
    }


@pytest.mark.parametrize("name", list(attacks(Path("x"))))
def test_nothing_is_run(name: str, tmp_path: Path) -> None:
    target = tmp_path / "made"
    with pytest.raises(DataError, match="file is not a batch of CIFAR, or damaged: "):
        pickles.read(attacks(target)[name], "file")
    assert not target.exists()


def test_the_attacks_would_work_elsewhere(tmp_path: Path) -> None:
    """Otherwise the test above would prove nothing."""
    for name in ("os.system", "builtins.eval", "builtins.exec", "nested getattr", "dotted name", "old instance"):
        target = tmp_path / name.replace(" ", "_")
        pickle.loads(attacks(target)[name])
        assert target.exists(), name


def test_the_error_names_the_refused_object() -> None:
    with pytest.raises(DataError, match=r"it asks for (posix|nt)\.system, which is not plain data"):
        pickles.read(pickle.dumps(Call(os.system, "true")), "file")
    with pytest.raises(DataError, match="an array of type 'O8', not uint8"):
        pickles.read(pickle.dumps({"data": np.array([None])}, 2), "file")
    with pytest.raises(DataError, match="it holds a list, not a dict"):
        pickles.read(pickle.dumps([1]), "file")
    with pytest.raises(DataError, match="bytes encoded as 'rot13'"):
        pickles.read(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00rot13\x86R.", "file")


def test_damaged_pickles_raise_data_errors() -> None:
    whole = pickle.dumps({b"data": np.zeros((5, 7), np.uint8), b"labels": [1, 2, 3]}, 2)
    for length in range(len(whole)):
        with pytest.raises(DataError, match="file is not a batch of CIFAR, or damaged"):
            pickles.read(whole[:length], "file")
