"""What is installed: pinned, under licences that allow it, and without the faults that are listed here.

Both lists are reviewed by hand when `constraints.txt` changes. Databases of vulnerabilities are online services, which
a test must not need; SECURITY.md has the command that asks one.
"""

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    match[1].lower().replace("_", "-"): Version(match[2])
    for match in re.finditer(r"^([\w.-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}
# Permissive, or (MPL) with duties for changes of the package's own files only.
LICENCES = re.compile(
    r"MIT(-CMU)?|(3-Clause )?BSD(-[23]-Clause)?|0BSD|Apache([- ]2\.0)?|ISCL?|PSF-2\.0|Python Software Foundation"
    r"|CNRI-Python|MPL[- ]2\.0|Mozilla Public|2\.0|BSL-1\.0|Zlib|CC0-1\.0|HPND|Unlicense"
)
READ = {"torchao": "BSD-3-Clause"}  # the licence files of packages whose metadata name none, read by hand
WORDS = re.compile(r"\b(AND|OR|WITH LLVM-exception|Software License|License)\b|[();]")
# The first version without a fault that concerns who opens files or serves pages.
MENDED = {
    "torch": ("2.10.0", "CVE-2026-24747: torch.load(weights_only=True) writes beyond its memory"),
    "pillow": ("11.3.0", "CVE-2025-48379: a buffer overflow in DDS images"),
    "numpy": ("1.22.0", "CVE-2021-41496: a buffer overflow in array_from_pyobj"),
    "jinja2": ("3.1.6", "CVE-2025-27516: templates leave the sandbox"),
    "onnx": ("1.17.0", "CVE-2024-5187: archives of models write outside of their folder"),
    "protobuf": ("6.31.1", "CVE-2025-4565: deep messages end the process"),
    "requests": ("2.32.4", "CVE-2024-47081: passwords from .netrc are sent to other hosts"),
    "urllib3": ("2.5.0", "CVE-2025-50181: redirects are followed although they are switched off"),
    "certifi": ("2024.7.4", "CVE-2024-39689: a certificate authority that is not trusted any more"),
    "idna": ("3.7", "CVE-2024-3651: long names take quadratic time"),
    "werkzeug": ("3.0.6", "CVE-2024-49767: forms take memory without bounds"),
    "setuptools": ("78.1.1", "CVE-2025-47273: downloads write outside of their folder"),
    "fonttools": ("4.60.2", "CVE-2025-66034: files of designs write outside of their folder"),
    "filelock": ("3.20.3", "CVE-2025-68146, CVE-2026-22701: a lock that is a link truncates its target"),
}


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(lines: list[str], extras: frozenset[str]) -> Iterator[Requirement]:
    """Those that apply here."""
    for found in map(Requirement, lines):
        if found.marker is None or any(found.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            yield found


def needed(extra: str) -> set[str]:
    """The names of all packages that an extra of the project installs, where they are installed."""
    names: set[str] = set()
    lines = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    left = [(found, frozenset(found.extras)) for found in requirements(lines, frozenset())]
    while left:
        found, extras = left.pop()
        name = normalised(found.name)
        if name == "slimstart":
            names |= set().union(*map(needed, extras))
        elif name not in names:
            try:
                more = metadata.requires(name) or []
            except metadata.PackageNotFoundError:
                continue
            names.add(name)
            left += [(one, frozenset(one.extras)) for one in requirements(more, extras)]
    return names


def licence(name: str) -> str:
    """What a package says of its licence: an expression, or the classifiers, or a line of text."""
    found = metadata.metadata(name)
    classifiers = [one.split(" :: ")[-1] for one in found.get_all("Classifier", []) if one.startswith("License ::")]
    named = [one for one in classifiers if one != "OSI Approved"]
    text = found.get("License-Expression") or "; ".join(named) or (found.get("License") or "").partition("\n")[0]
    return text or READ.get(name, "")


def is_permissive(text: str) -> bool:
    parts = [part.strip() for part in WORDS.split(WORDS.sub(";", text)) if part and part.strip() not in ("", ";")]
    return bool(parts) and all(LICENCES.fullmatch(part) for part in parts)


def test_the_library_needs_three_packages() -> None:
    assert {normalised(Requirement(line).name) for line in PROJECT["dependencies"]} == {"torch", "numpy", "safetensors"}


@pytest.mark.parametrize("extra", ["dev", "docs"])
def test_everything_that_is_installed_is_pinned(extra: str) -> None:
    """PyTorch's builds for GPUs need packages of NVIDIA, which are versioned with PyTorch."""
    found = {name for name in needed(extra) if not re.match("nvidia-|cuda-|triton$", name)}
    assert {"torch", "numpy", "pillow"} <= found
    assert found - PINS.keys() == set()


def test_licences() -> None:
    installed = {normalised(one.name) for one in metadata.distributions()} & PINS.keys()
    assert {"torch", "numpy", "pillow", "pytest"} <= installed
    found = {name: licence(name) for name in sorted(installed)}
    assert {name: text for name, text in found.items() if not is_permissive(text)} == {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("MIT", True),
        ("Apache-2.0 AND MIT", True),
        ("(MIT OR Apache-2.0)", True),
        ("BSD License", True),
        ("GPL-3.0-only", False),
        ("MIT AND GPL-2.0-or-later", False),
        ("GNU Lesser General Public License v3 (LGPLv3)", False),
        ("Other/Proprietary License", False),
        ("", False),
    ],
)
def test_which_licences_are_permissive(text: str, expected: bool) -> None:
    assert is_permissive(text) == expected


@pytest.mark.parametrize("name", MENDED)
def test_pins_are_without_known_faults(name: str) -> None:
    version, fault = MENDED[name]
    assert PINS[name] >= Version(version), f"{name} {PINS[name]} has {fault}"


def test_every_pytorch_that_is_supported_reads_checkpoints_safely() -> None:
    """From 2.6 on (CVE-2025-32434). `io.plain_pickles` refuses the files of CVE-2026-24747 under 2.8 and 2.9."""
    (torch,) = (found for found in map(Requirement, PROJECT["dependencies"]) if found.name == "torch")
    (bound,) = torch.specifier
    assert bound.operator == ">="
    assert Version(bound.version) >= Version("2.6.0")
