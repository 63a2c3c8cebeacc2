# SPDX-License-Identifier: Apache-2.0
"""Builds csrc/per_torch as fused_layernorm/autograd/*.so, once for each minor version of torch.

Each library needs only the C++ headers of its own torch. It needs neither CUDA nor Python, and is
linked with empty libraries that have the names of torch's. setup.py compiles the library for the
torch that it runs under, and one for each version whose headers lie in the folder that
FUSED_LAYERNORM_TORCH_HEADERS names. This command downloads torch's wheel of every minor version,
one at a time, and keeps the headers in that folder:

    python build_tools/per_torch.py build/torch-headers
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
SOURCES = CSRC / "per_torch"
# What the libraries share with the kernels' library.
SHARED = ("base/chip.h", "base/params.h", "base/types.h", "bindings/data_types.h",
          "bindings/namespace.h", "call/arguments.h", "call/description.h", "call/schemas.h",
          "gated/params.h", "groups/params.h")  # fmt: skip
# The first release of each minor version: its later releases have the same C++ interface. Beside
# each, the SHA-256 of its wheels for HEADERS_PYTHON, on x86_64 and on aarch64.
HEADERS_PYTHON = "3.11"  # the headers are the same in the wheels for every version of Python
RELEASES = {
    "2.10.0": ("ac5bdcbb074384c66fa160c15b1ead77839e3fe7ed117d667249afce0acabfac",
               "3282d9febd1e4e476630a099692b44fdc214ee9bf8ee5377732d9d9dfe5712e4"),
    "2.11.0": ("7aa2f9bbc6d4595ba72138026b2074be1233186150e9292865e04b7a63b8c67a",
               "d91aac77f24082809d2c5a93f52a5f085032740a1ebc9252a7b052ef5a4fddc6"),
    "2.12.0": ("415c1b8d0412f67551c8e89a2daca0fb3e56694af0281ba155eaa9da481f58b4",
               "c12592630aef72feaf18bd3f197ef587bbfa21131b31c38b23ab2e55fce92e36"),
    "2.13.0": ("60fcdcb2f3876e21146cb4524ef06397d727ca9ad5f020818547e25075fe3cb7",
               "092790c696a760c729fd5722835f50b9d81fd7c8f141571f3f3cf4081a8f664c"),
    "2.14.0": ("8d9e232b6376c62f3090237889fb1cb6887c0ece9f73e6c1052e80fc1481f999",
               "4dbea8a10d80b10dff2be1ed467d2617b704fe6bf76bbfad4194774c8f6d886b"),
    "2.15.0": ("48c2d861134c0b5697c7602cb5ffa68f62a2989fdcd1717e593356f67996ca1e",
               "58ce2ebfb3430941353109a85be63ee8e941da22f13daa2c43344eeb51c81e06"),
}  # fmt: skip
CXX20_SINCE = (2, 13)
LIBRARIES = ("torch_cpu", "c10")

_library = ROOT / "fused_layernorm" / "ops" / "autograd_library.py"
autograd_library = SimpleNamespace(**runpy.run_path(str(_library)))


def minor_of(release: str) -> str:
    return release.rsplit(".", 1)[0]


def version_of(include: Path) -> str | None:
    """The minor version of the headers in a folder, from version.h; None if that is missing."""
    try:
        text = (include / "torch" / "headeronly" / "version.h").read_text()
    except OSError:
        return None
    return ".".join(re.findall(r"#define TORCH_VERSION_(?:MAJOR|MINOR) (\d+)", text))


def download_headers(release: str, folder: Path) -> None:
    """Puts the headers of a release of torch, from its wheel, into folder/<minor>/include."""
    target = folder / minor_of(release)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as work:
        hashes = "".join(f" --hash=sha256:{digest}" for digest in RELEASES[release])
        listed = Path(work) / "requirements.txt"
        listed.write_text(f"torch=={release}{hashes}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar", "off"]
        command += ["--no-deps", "--only-binary=:all:", "--python-version", HEADERS_PYTHON]
        command += ["--platform", f"manylinux_2_28_{platform.machine()}", "--dest", work]
        command += ["--require-hashes", "-r", str(listed)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        (wheel,) = Path(work).glob("torch-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.startswith("torch/include/")]
            archive.extractall(work, names)
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        (Path(work) / "torch" / "include").rename(target / "include")


def collect_headers(folder: Path) -> None:
    """Downloads the headers that the folder lacks. Prints a line for each release that it tries."""
    for release in RELEASES:
        minor = minor_of(release)
        if version_of(folder / minor / "include") == minor:
            continue
        try:
            download_headers(release, folder)
        except (OSError, ValueError, zipfile.BadZipFile, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", "") or str(error)).strip()
            if "DO NOT MATCH THE HASHES" in said:
                sys.exit(f"torch {release}: its wheel is not the one that RELEASES names")
            print(f"torch {release}: no headers: {said.splitlines()[-1]}", flush=True)
        else:
            print(f"torch {release}: headers in {folder / minor}", flush=True)


def wanted(torch_version: str, torch_include: Path) -> tuple[dict[str, Path], list[str]]:
    """The headers to compile with, by minor version, and notes on why others are left out."""
    found: dict[str, Path] = {}
    notes = []
    if sys.platform != "linux":
        return found, [f"no autograd library: none is built on {sys.platform}"]
    if minor := autograd_library.released_minor(torch_version):
        found[minor] = torch_include
    else:
        notes.append(f"no autograd library for torch {torch_version}, which is no release")
    if folder := os.environ.get("FUSED_LAYERNORM_TORCH_HEADERS"):
        for minor in map(minor_of, RELEASES):
            include = Path(folder).resolve() / minor / "include"
            if version_of(include) == minor:
                found.setdefault(minor, include)
            elif minor not in found:
                notes.append(f"no autograd library for torch {minor}: no headers in {folder}")
    return found, notes


def summary(headers: dict[str, Path]) -> str:
    """What a build with these headers gives under which torch, for whoever builds."""
    others = f"torch {' '.join(headers)}; under any other" if headers else "no torch; under any"
    return (f"autograd in C++ for {others} release it runs in Python, with the same results but "
            f"slower calls; {autograd_library.REMEDY}")  # fmt: skip


def run(command: list[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        sys.exit(f"fused_layernorm: {' '.join(command)} failed:\n{result.stdout}{result.stderr}")


def link_stubs(folder: Path, compiler: str) -> None:
    """Makes empty libraries named as torch's: symbols are resolved when a library is loaded."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (f"lib{library}.so" for library in LIBRARIES):
        empty = ["-shared", "-x", "c++", "/dev/null", f"-Wl,-soname,{name}"]
        run([compiler, *empty, "-o", str(folder / name)])


def compile_library(minor: str, include: Path, cache: Path, compiler: str) -> Path:
    """The path of the library for a minor version, compiled unless the cache has it."""
    standard = "c++20" if tuple(map(int, minor.split("."))) >= CXX20_SINCE else "c++17"
    command = [compiler, f"-std={standard}", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-s"]
    command += ["-DAT_PER_OPERATOR_HEADERS", "-D_GLIBCXX_USE_CXX11_ABI=1", f"-I{CSRC}"]
    command += ["-isystem", str(include)]
    command += ["-isystem", str(include / "torch" / "csrc" / "api" / "include")]
    command += [str(SOURCES / "autograd.cpp"), f"-L{cache}", "-Wl,--no-as-needed"]
    command += [f"-l{name}" for name in LIBRARIES]
    key = hashlib.sha256("\0".join([minor, *command]).encode())
    for source in [*sorted(SOURCES.glob("*.[ch]*")), *(CSRC / name for name in SHARED)]:
        key.update(source.read_bytes())
    path = cache / f"{minor}-{key.hexdigest()[:16]}.so"
    if not path.is_file():
        partial = path.with_suffix(".partial")
        run([*command, "-o", str(partial)])
        partial.rename(path)
    return path


def build(package: Path, headers: dict[str, Path], jobs: int) -> None:
    """Makes package/autograd hold the libraries of these minor versions, and no others."""
    cache, target = ROOT / "build" / "autograd", package / "autograd"
    compiler = os.environ.get("CXX") or "g++"
    shutil.rmtree(target, ignore_errors=True)
    if not headers:
        return
    link_stubs(cache, compiler)
    with ThreadPoolExecutor(jobs) as pool:
        made = [pool.submit(compile_library, *one, cache, compiler) for one in headers.items()]
        paths = {minor: future.result() for minor, future in zip(headers, made, strict=True)}
    target.mkdir(parents=True)
    for minor, path in paths.items():
        shutil.copy2(path, autograd_library.path_of(minor, target))


if __name__ == "__main__":
    collect_headers(Path(sys.argv[1]))
