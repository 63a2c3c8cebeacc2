# SPDX-License-Identifier: Apache-2.0
"""Build of the one binary, libfused_layernorm.so: with CUDA kernels where there is an nvcc.

The binary uses LibTorch's stable ABI, knows nothing of Python and carries its own CUDA runtime, so
one file serves every Python >= 3.10 and every torch >= 2.10, whatever they were built with.
Autograd in C++ is bound to one minor version of torch: build_tools/per_torch.py compiles it.
Everything else about the package stands in pyproject.toml.

Environment variables:
    CUDA_HOME                       the CUDA toolkit (else: the nvcc on PATH, then usual places,
                                    then the nvcc of Python packages, `pip install
                                    "cuda-toolkit[nvcc,cccl]>=13"`, which an isolated build has)
    FUSED_LAYERNORM_CUDA=packages   take the nvcc of Python packages even where there is a toolkit
    TORCH_CUDA_ARCH_LIST            e.g. "9.0", "8.0;9.0+PTX" (else: every one in DEFAULT_ARCHS
                                    that nvcc knows, with PTX of one)
    MAX_JOBS                        files compiled at once (else: one a core)
    FUSED_LAYERNORM_TORCH_HEADERS   a folder of C++ headers of other versions of torch, for which
                                    csrc/per_torch is compiled too (build_tools/per_torch.py)
    FUSED_LAYERNORM_CPU_ONLY=1      leave the CUDA kernels out even where there is an nvcc
    FUSED_LAYERNORM_TRIMMED=1       for developers: the third of the kernels that is of float32 and
                                    bfloat16; what needs others raises an error that says so
    FUSED_LAYERNORM_COMPRESS=speed  nvcc's --compress-mode (else: size): of CUDA 12 a binary of
                                    twice the size, which drivers before R550 read too
    FUSED_LAYERNORM_PTXAS_VERBOSE=1 let ptxas print registers, stack and spills of every kernel
"""

import hashlib
import os
import re
import subprocess
import sys
from glob import glob
from pathlib import Path

import torch
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "build_tools"))
import nvcc as compilers  # noqa: E402
import per_torch  # noqa: E402

# Machine code for x.0 runs on every device of major version x: that for 8.0 serves 8.6, 8.7 and 8.9
# too. PTX of 10.0 serves 11.0 and whatever comes later, compiled by the driver at first use.
DEFAULT_ARCHS = ["7.5", "8.0", "9.0", "10.0+PTX", "12.0"]
TORCH_TARGET_VERSION = "0x020a000000000000"  # torch 2.10: the oldest that the binary loads under
COMPRESS_MODE_SINCE = (12, 8)
COMPRESS_MODES = ("size", "balance", "speed", "none")
# These files use instructions of Hopper alone (setmaxnreg): their code for 9.0 is made for 9.0a.
FOR_HOPPER = ("csrc/forward/ring.cu",)
CUDA_FOLDERS = ("bindings/cuda", "call")  # left out of a build without CUDA kernels
NO_NVCC = 'set CUDA_HOME or PATH, or pip install "cuda-toolkit[nvcc,cccl]>=13"'


def compress_mode(version: tuple[int, int]) -> str | None:
    """nvcc's --compress-mode, or None for an nvcc without this option."""
    mode = os.environ.get("FUSED_LAYERNORM_COMPRESS") or "size"
    if mode not in COMPRESS_MODES:
        offered = ", ".join(COMPRESS_MODES)
        sys.exit(f"fused_layernorm: FUSED_LAYERNORM_COMPRESS is {mode!r}; expected {offered}")
    return mode if version >= COMPRESS_MODE_SINCE else None


def least_driver(version: tuple[int, int]) -> int:
    """The oldest driver that runs the binary, as cudaDriverGetVersion numbers them: any of its
    major version, but none before 12.4 reads what is compressed in the modes size and balance."""
    compressed = version[0] == 12 and compress_mode(version) in ("size", "balance")
    return 1000 * version[0] + (40 if compressed else 0)


def arch_list(nvcc: str) -> list[str]:
    """The architectures to compile for, as "90", "90a" or "90+PTX", in the order given."""
    known = set(re.findall(r"compute_(\d+)", compilers.run(nvcc, "--list-gpu-arch")))
    archs = re.findall(r"[^;,\s]+", os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if not archs:
        archs = [a for a in DEFAULT_ARCHS if a.removesuffix("+PTX").replace(".", "") in known]
        if not any(arch.endswith("+PTX") for arch in archs):
            archs[-1] += "+PTX"
    for arch in archs:
        match = re.fullmatch(r"(\d+)\.(\d)[af]?(\+PTX)?", arch)
        if match is None or match[1] + match[2] not in known:
            offered = " ".join(f"{a[:-1]}.{a[-1]}" for a in sorted(known, key=int))
            sys.exit(f"fused_layernorm: TORCH_CUDA_ARCH_LIST has {arch!r}; {nvcc} knows {offered}")
    archs = list(dict.fromkeys(arch.replace(".", "") for arch in archs))
    return [arch for arch in archs if arch + "+PTX" not in archs]


def gencode_flags(archs: list[str]) -> list[str]:
    codes = [(arch.removesuffix("+PTX"), "sm") for arch in archs]
    codes += [(arch.removesuffix("+PTX"), "compute") for arch in archs if arch.endswith("+PTX")]
    return [f"-gencode=arch=compute_{number},code={kind}_{number}" for number, kind in codes]


def job_count() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return int(os.environ.get("MAX_JOBS") or cores or 1)


def nvcc_flags(version: tuple[int, int], archs: list[str], files: int) -> list[str]:
    jobs = job_count()
    # Files are compiled side by side; cores beyond their number take architectures of one file.
    threads = max(1, min(jobs // files, len(archs)))
    flags = ["-O3", f"--threads={threads}", *gencode_flags(archs)]
    if mode := compress_mode(version):
        flags += [f"--compress-mode={mode}", f"--split-compile={jobs}"]
    if os.environ.get("FUSED_LAYERNORM_PTXAS_VERBOSE") == "1":
        flags.append("-Xptxas=-v")
    return flags


def make_extension() -> tuple[Extension, str]:
    """The library, and what it is built for, in words."""
    define_macros, cxx_flags = [("TORCH_TARGET_VERSION", TORCH_TARGET_VERSION)], ["-O3", "-g0"]
    cuda_flags, link_args = list[str](), list[str]()
    libraries, library_dirs = ["torch_cpu"], list[str]()
    if sys.platform == "linux":
        # libtorch_cuda.so is loaded with local scope: its symbols are found through libtorch.so
        # alone, which therefore stays a needed library although no symbol of it is used directly.
        link_args += ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed"]
        link_args += ["-Wl,--version-script=csrc/bindings/exports.map", "-s"]
    folders = ("backward", "base", "bindings", "forward", "groups")
    sources = sorted(path for folder in folders for path in glob(f"csrc/{folder}/*.cpp"))

    cpu_only = os.environ.get("FUSED_LAYERNORM_CPU_ONLY") == "1"
    nvcc = None if cpu_only else compilers.find_nvcc()
    if nvcc is None:
        reason = "FUSED_LAYERNORM_CPU_ONLY=1" if cpu_only else f"no nvcc: {NO_NVCC}"
        kind = f"without CUDA kernels ({reason})"
        make = cpp_extension.CppExtension
    else:
        archs = arch_list(nvcc.path)
        print(f"fused_layernorm: nvcc of {nvcc.origin}, {nvcc.path}", flush=True)
        kind = f"with CUDA {nvcc.version_string} of {nvcc.origin} for {' '.join(archs)}"
        # torch would ask for an nvcc of its own CUDA version, or have none; the binary, which has a
        # CUDA runtime inside, needs neither.
        cpp_extension.CUDA_HOME = str(nvcc.home)
        torch.version.cuda = nvcc.version_string
        make = cpp_extension.CUDAExtension
        cuda_sources = sorted(glob("csrc/**/*.cu", recursive=True))
        sources += sorted(path for folder in CUDA_FOLDERS for path in glob(f"csrc/{folder}/*.cpp"))
        sources += cuda_sources
        define_macros.append(("FUSED_LAYERNORM_CUDA", "1"))
        if os.environ.get("FUSED_LAYERNORM_TRIMMED") == "1":
            define_macros.append(("FUSED_LAYERNORM_TRIMMED", "1"))
            kind += ", trimmed to float32 and bfloat16"
        cxx_flags += [
            f'-DFUSED_LAYERNORM_CUDA_VERSION="{nvcc.version_string} of {nvcc.origin}"',
            f'-DFUSED_LAYERNORM_ARCHS="{" ".join(archs)}"',
            f"-DFUSED_LAYERNORM_LEAST_DRIVER={least_driver(nvcc.version)}",
        ]
        cuda_flags = nvcc_flags(nvcc.version, archs, len(cuda_sources))
        libraries += ["cudart_static", "rt", "dl", "pthread"]
        library_dirs += [str(nvcc.home / "lib64"), str(nvcc.home / "lib")]

    module = make(
        name="fused_layernorm.libfused_layernorm",
        sources=sources,
        depends=sorted(glob("csrc/**/*.*", recursive=True)),
        include_dirs=[str(ROOT / "csrc")],
        define_macros=define_macros,
        extra_compile_args={"cxx": cxx_flags, "nvcc": cuda_flags},
        extra_link_args=link_args,
        library_dirs=library_dirs,
    )
    module.libraries = libraries  # of the stable ABI alone, and no CUDA library
    return module, kind


def run_ninja(build_directory: str, verbose: bool, error_prefix: str) -> None:
    """Runs ninja in place of torch's way, which shows whole commands: a line a file, at once."""
    plan = Path(build_directory) / "build.ninja"
    root = f"{ROOT}{os.sep}"
    # A line "build OBJECT: RULE SOURCE" says what is compiled, without the folders above csrc.
    build = re.compile(r"^(build \S+: \S*compile )(\S+)$", re.MULTILINE)
    text = plan.read_text()
    # Relative paths: a copy of the tree, objects included, compiles nothing again.
    text = text.replace(root, os.path.relpath(root, build_directory) + os.sep)
    flags = re.search(r"^cuda_post_cflags = .*$", text, re.MULTILINE)

    def described(match: re.Match[str]) -> str:
        source = re.sub(r"^(\.\./)+", "", match[2])
        lines = [match[0], f"description = {source}"]
        if source in FOR_HOPPER and flags is not None:
            lines.append(flags[0].replace("compute_90,code=sm_90", "compute_90a,code=sm_90a"))
        return "\n  ".join(lines)

    plan.write_text(build.sub(described, text))
    command = ["ninja", "-j", os.environ["MAX_JOBS"]]
    env = {**os.environ, "NINJA_STATUS": "fused_layernorm: compiled %f of %t: "}
    sys.stdout.flush()
    if subprocess.run(command, cwd=build_directory, env=env, check=False).returncode != 0:
        raise RuntimeError(error_prefix)


cpp_extension._run_ninja_build = run_ninja


class BuildExtension(cpp_extension.BuildExtension):
    """Compiles a library that torch.ops.load_library loads, not a Python module."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def finalize_options(self) -> None:
        super().finalize_options()
        # One folder of objects for each kind of binary, whether for a wheel, an editable install
        # or in place: what did not change is not compiled again.
        key = hashlib.sha256(f"{sys.prefix} {torch.__version__} {kind}".encode()).hexdigest()[:8]
        self.build_temp = os.path.join("build", f"objects-{key}")
        os.environ["MAX_JOBS"] = str(job_count())

    def build_extensions(self) -> None:
        print(f"fused_layernorm: building {kind}", flush=True)
        super().build_extensions()

    def run(self) -> None:
        include = Path(cpp_extension.include_paths()[0])
        headers, notes = per_torch.wanted(torch.__version__, include)
        package = Path(self.get_ext_fullpath(extension.name)).parent
        per_torch.build(package, headers, int(os.environ["MAX_JOBS"]))
        super().run()
        print("".join(f"fused_layernorm: {note}\n" for note in notes), end="")
        print(f"fused_layernorm: {per_torch.summary(headers)}", flush=True)


class BdistWheel(bdist_wheel):
    """A wheel of one platform for every Python 3: nothing in it is built for a certain Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


extension, kind = make_extension()
commands = {"build_ext": BuildExtension, "bdist_wheel": BdistWheel}
setup(ext_modules=[extension], cmdclass=commands)
