"""The package as users get it: the wheel, the library's symbols, the headers, what importing costs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch

import torch_gpusync

_ROOT = Path(__file__).resolve().parent.parent
_TORCH = Path(torch.__file__).parent
_HEADERS = sorted(path.name for path in (_ROOT / "csrc/include/gpusync").iterdir())
_TARGET = "-DTORCH_TARGET_VERSION=0x020b000000000000"  # torch 2.11, the oldest that the one binary loads in
_NVCC = shutil.which("nvcc")


def _run(*command: str | Path, timeout: float = 120, **environ: str) -> str:
    """Runs a program outside the source tree and returns its stdout; a failure shows all that it printed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd="/",
        env={**os.environ, **environ},
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


# ---- the wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The path of a wheel that is built from this tree with the environment in use.

    The build folder is the Makefile's: what it has compiled for the editable install is not compiled again.
    """
    folder = tmp_path_factory.mktemp("wheel")
    build = _ROOT / "build" / Path(sys.prefix).name.removeprefix(".")
    options = ["--no-build-isolation", "--no-deps", f"--config-settings=build-dir={build}"]
    _run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", folder, _ROOT, timeout=500)
    (path,) = folder.iterdir()
    return path


@pytest.fixture(scope="session")
def unpacked(wheel: Path) -> Path:
    """The folder that stands for site-packages after an ordinary (not editable) install of the wheel."""
    folder = wheel.parent / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


@pytest.mark.limit(600)
def test_one_wheel_serves_every_python(wheel: Path, unpacked: Path) -> None:
    name, _, python, abi, platform = wheel.stem.split("-")
    assert (name, python, abi) == ("torch_gpusync", "py3", "none")
    assert platform == sysconfig.get_platform().replace("-", "_")
    (dist_info,) = unpacked.glob("*.dist-info")
    assert f"Tag: py3-none-{platform}" in (dist_info / "WHEEL").read_text().splitlines()


@pytest.mark.limit(600)
def test_wheel_holds_the_library_the_headers_and_the_types(unpacked: Path) -> None:
    package = unpacked / "torch_gpusync"
    assert (package / "_C.so").is_file()
    assert (package / "py.typed").is_file()
    assert sorted(path.name for path in (package / "include/gpusync").iterdir()) == _HEADERS
    sources = {path.relative_to(_ROOT) for path in (_ROOT / "torch_gpusync").rglob("*.py")}
    assert {path.relative_to(unpacked) for path in package.rglob("*.py")} == sources
    (dist_info,) = unpacked.glob("*.dist-info")
    assert (dist_info / "licenses/LICENSE").read_text() == (_ROOT / "LICENSE").read_text()
    assert {path.name for path in unpacked.iterdir()} == {"torch_gpusync", dist_info.name}


@pytest.mark.limit(600)
def test_torch_is_the_only_dependency(unpacked: Path) -> None:
    (dist_info,) = unpacked.glob("*.dist-info")
    required = re.findall(r"^Requires-Dist: (.*)$", (dist_info / "METADATA").read_text(), re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.11"]


@pytest.mark.limit(600)
def test_installed_wheel_imports_and_finds_its_own_files(unpacked: Path) -> None:
    # -S leaves out the .pth files, and with them the editable install that this suite itself runs on.
    code = f"""
import sys
sys.path[:0] = [{str(unpacked)!r}, {sysconfig.get_path("purelib")!r}]
import torch, torch_gpusync
torch.ops.gpusync.barrier.default  # the library is loaded
print(torch_gpusync.__file__, torch_gpusync.include_path(), sep="\\n")
"""
    package = unpacked / "torch_gpusync"
    printed = _run(sys.executable, "-S", "-c", code).splitlines()
    assert printed == [str(package / "__init__.py"), str(package / "include")]


def test_build_without_torch_says_what_to_do(tmp_path: Path) -> None:
    _run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare")
    python = tmp_path / "bare/bin/python"
    cmake = shutil.which("cmake", path=f"{sys.prefix}/bin:{os.environ['PATH']}")
    assert cmake is not None
    configure = [cmake, "-S", _ROOT / "csrc", "-B", tmp_path / "build", f"-DPython_EXECUTABLE={python}"]
    done = subprocess.run(configure, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode != 0
    hint = "install torch>=2.11, then build with pip's --no-build-isolation."
    assert f"torch is not installed in {python}: {hint}" in map(str.strip, done.stderr.splitlines())


# ---- the library's symbols


def _undefined_symbols(library: Path) -> set[str]:
    lines = _run("nm", "--dynamic", "--undefined-only", library).splitlines()
    return {line.split()[-1].split("@")[0] for line in lines}


@cache
def _torch_symbols(*flags: str) -> frozenset[str]:
    """The C functions of torch's shims that its headers declare under the given preprocessor flags."""
    shims = ["csrc/inductor/aoti_torch/c/shim.h", "csrc/stable/c/shim.h"]
    includes = [word for shim in shims for word in ("-include", f"torch/{shim}")]
    options = ["-std=c++20", "-E", "-P", "-xc++", f"-I{_TORCH}/include"]
    text = _run("g++", *options, *flags, *includes, "/dev/null")
    return frozenset(re.findall(r"\b((?:aoti_)?torch_\w+)\s*\(", text))


def _too_new(symbols: set[str]) -> set[str]:
    """Those of torch's functions among the symbols that torch 2.11 does not promise.

    The one weak symbol is known by name: its declaration needs USE_CUDA, and the library checks it for null.
    """
    ours = {symbol for symbol in symbols if re.match(r"(aoti_)?torch_", symbol)}
    return ours - _torch_symbols(_TARGET) - {"aoti_torch_get_current_cuda_stream"}


@pytest.mark.limit(600)
def test_library_needs_torch_but_neither_cuda_nor_python(unpacked: Path) -> None:
    dynamic = _run("readelf", "--dynamic", "--wide", unpacked / "torch_gpusync/_C.so")
    needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
    system = r"lib(stdc\+\+|m|gcc_s|c|rt|dl|pthread)\.so\.\d+|ld-linux-.*"
    # No symbol of libtorch.so is used here: in a CUDA torch it is what loads libtorch_cuda.
    torch_libraries = {"libtorch.so", "libtorch_cpu.so", "libc10.so"}
    assert {name for name in needed if not re.fullmatch(system, name)} == torch_libraries
    assert not re.search(r"R(UN)?PATH", dynamic), "a path of the machine that built it"


@pytest.mark.limit(600)
def test_library_uses_the_stable_abi_of_torch_2_11_alone(unpacked: Path) -> None:
    symbols = _undefined_symbols(unpacked / "torch_gpusync/_C.so")
    assert "torch_library_impl" in symbols, "the library registers kernels through the stable ABI"
    assert _too_new(symbols) == set()
    assert not {symbol for symbol in symbols if re.match(r"_?Py[A-Z_]", symbol)}, "no Python C API"
    unstable = {symbol for symbol in symbols if re.search(r"N[KRO]*(3c10|2at|5torch)", symbol)}
    assert not unstable, "torch's C++ symbols change between versions"


def test_symbols_of_a_newer_torch_are_told_apart() -> None:
    """The check above can fail: what this torch has beyond 2.11 is found, if it is newer than 2.11."""
    newer = set(_torch_symbols() - _torch_symbols(_TARGET))
    assert _too_new(newer) == newer - {"aoti_torch_get_current_cuda_stream"}
    if torch.torch_version.TorchVersion(torch.__version__) >= (2, 13):
        # Without TORCH_TARGET_VERSION, a library built on 2.13 asks for this one and does not load on 2.11.
        assert "torch_exception_get_what_without_backtrace" in newer


# ---- headers


def test_include_path_is_the_source_of_every_header() -> None:
    installed = Path(torch_gpusync.include_path()) / "gpusync"
    assert sorted(path.name for path in installed.iterdir()) == _HEADERS
    for name in _HEADERS:
        source = _ROOT / "csrc/include/gpusync" / name
        assert (installed / name).read_text() == source.read_text(), "installed before its last change"


@pytest.mark.parametrize("header", _HEADERS)
def test_header_compiles_by_itself_on_the_host(header: str) -> None:
    flags = ["-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Werror", "-xc++"]
    _run("g++", *flags, f"-I{torch_gpusync.include_path()}", "-include", f"gpusync/{header}", "/dev/null")


@pytest.mark.skipif(_NVCC is None, reason="needs nvcc")
@pytest.mark.parametrize("header", _HEADERS)
def test_header_compiles_by_itself_for_the_device(header: str, tmp_path: Path) -> None:
    unit = tmp_path / "unit.cu"
    unit.write_text(f"#include <gpusync/{header}>\n")
    flags = ["-std=c++20", "-arch=sm_80", "-cubin", "-Werror=all-warnings"]
    _run(str(_NVCC), *flags, f"-I{torch_gpusync.include_path()}", "-o", tmp_path / "unit.cubin", unit)


@pytest.mark.parametrize("header", _HEADERS)
def test_header_needs_nothing_of_torch(header: str) -> None:
    text = (_ROOT / "csrc/include/gpusync" / header).read_text()
    for included in re.findall(r'^\s*#\s*include\s*[<"](.*)[>"]', text, re.MULTILINE):
        assert not re.match(r"(torch|c10|ATen|caffe2)/", included), f"{header} includes {included}"


# ---- importing


def test_import_is_cheap() -> None:
    """Importing torch._dynamo costs about a second, and only the first group's token needs it."""
    code = "import sys, torch; had = set(sys.modules); import torch_gpusync; print(*(set(sys.modules) - had))"
    new = _run(sys.executable, "-c", code).split()
    assert "torch_gpusync" in new
    heavy = (
        "torch._dynamo",
        "torch._inductor",
        "numpy",
        "matplotlib",
        "tqdm",
        "torch_gpusync.testing",
        "pytest",
    )
    assert not [name for name in new if name.startswith(heavy)]


def test_testing_needs_no_pytest() -> None:
    code = "import sys, torch_gpusync.testing; print(*sys.modules)"
    assert "pytest" not in _run(sys.executable, "-c", code).split()
