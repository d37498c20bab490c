"""What the image's last build step refuses. ELF facts come from libraries compiled here, not from canned text."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddtree_appliance import image_check
from ddtree_appliance.errors import EXIT_FAILED, EXIT_OK, ApplianceError
from ddtree_appliance.image_check import (
    check_flashinfer,
    check_image,
    check_kernels,
    check_needed,
    check_patches,
    check_symbols,
    check_torch,
    compare_with_lock,
    main,
    parse_lock,
    read_defined,
    read_needed,
    read_undefined,
)
from ddtree_appliance.patching import VerifyReport

LOCKED = {"torch": "2.11.0", "flashinfer-python": "0.6.15.post1", "nvidia-cublas": "13.1.0.3"}
COMPLETE = [*LOCKED.items(), ("sglang", "0.5.17+ddtree.1"), ("ddtree-appliance", "0.1.0")]
# c10::foo(), which some torch would export, and c10::Error's typeinfo, which every torch exports.
FOO, TYPEINFO = "_ZN3c103fooEv", "_ZTIN3c105ErrorE"

needs_gcc = pytest.mark.skipif(
    any(shutil.which(tool) is None for tool in ("gcc", "nm", "readelf")), reason="gcc and binutils are not installed"
)


def test_parse_lock_reads_pins_and_no_hashes() -> None:
    text = "# made by scripts/lock\nTorch==2.11.0 \\\n    --hash=sha256:aa==\nflashinfer_python==0.6.15.post1 \\\n"
    assert parse_lock(text) == {"torch": "2.11.0", "flashinfer-python": "0.6.15.post1"}


def test_what_the_lock_says_is_accepted_however_names_are_spelt() -> None:
    installed = [
        ("Torch", "2.11.0"),
        ("flashinfer_python", "0.6.15.post1"),
        ("nvidia.cublas", "13.1.0.3"),
        *COMPLETE[3:],
    ]
    assert compare_with_lock(LOCKED, installed) == []


@pytest.mark.parametrize(
    ("installed", "said"),
    [
        ([*COMPLETE[1:]], "torch 2.11.0 is not installed"),
        ([("torch", "2.12.0"), *COMPLETE[1:]], "torch 2.12.0 is installed, the lock says 2.11.0"),
        ([*COMPLETE, ("numpy", "2.4.0")], "numpy 2.4.0 is installed, but the lock does not name it"),
        ([*COMPLETE, ("torch", "2.10.0")], "torch is installed 2 times: 2.10.0, 2.11.0"),
        ([*COMPLETE, ("torch", "2.11.0")], "torch is installed 2 times: 2.11.0, 2.11.0"),
        (COMPLETE[:-1], "ddtree-appliance is not installed"),
    ],
)
def test_every_other_set_of_distributions_is_refused(installed: list[tuple[str, str]], said: str) -> None:
    assert [problem.what for problem in compare_with_lock(LOCKED, installed)] == [said]


@pytest.mark.parametrize(
    ("version_py", "said"),
    [
        ("cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", []),
        ("cuda: Optional[str] = '12.8'\n", ["torch is built for CUDA 12.8, not for CUDA 13.0"]),
        ("cuda: Optional[str] = None\n", ["torch is built for no CUDA, not for CUDA 13.0"]),
        ("__version__ = '2.11.0+cpu'\n", ["torch is built for no CUDA, not for CUDA 13.0"]),
    ],
)
def test_torch_is_the_cuda_13_build(version_py: str, said: list[str]) -> None:
    assert [problem.what for problem in check_torch(version_py, "version.py")] == said


@pytest.mark.parametrize(
    ("installed", "refused"),
    [
        ([("flashinfer_python", "0.6.15.post1"), ("flashinfer-cubin", "0.6.15.post1")], []),
        ([("flashinfer-jit-cache", "0.6.15.post1+cu130")], []),
        ([("flashinfer-cubin", "0.6.15")], ["flashinfer-cubin"]),
        (
            [("flashinfer-python", "0.6.16"), ("flashinfer_jit_cache", "0.6.16")],
            ["flashinfer-jit-cache", "flashinfer-python"],
        ),
    ],
)
def test_flashinfer_is_one_pin(installed: list[tuple[str, str]], refused: list[str]) -> None:
    assert [problem.what.split()[0] for problem in check_flashinfer(LOCKED, installed)] == refused


def test_a_library_for_another_cuda_is_named_with_what_the_image_has() -> None:
    present = {"libcudart.so.13", "libtorch.so"}
    assert check_needed("common_ops.so", ["libtorch.so", "libcudart.so.13", "libcuda.so.1"], present) == []
    (problem,) = check_needed("common_ops.so", ["libcudart.so.12"], present)
    assert problem.what == "common_ops.so needs libcudart.so.12; the image has libcudart.so.13"
    assert problem.where == "common_ops.so"


@pytest.mark.parametrize(
    "symbol",
    [
        FOO,
        TYPEINFO,
        "_ZNK2at10TensorBase8data_ptrIfEEPT_v",
        "_ZNR5torch7Library4_defEv",
        "_ZN4c10d5StoreD1Ev",
        "_ZTVN6caffe21AE",
    ],
)
def test_a_symbol_of_torch_must_be_defined(symbol: str) -> None:
    (problem,) = check_symbols("common_ops.so", {symbol}, set())
    assert symbol in problem.what
    assert check_symbols("common_ops.so", {symbol}, {symbol}) == []


@pytest.mark.parametrize(
    "symbol", ["PyModule_Create2", "memcpy", "_ZN5flash3runERKN2at6TensorE", "_ZNSt6vectorIN3c10AEED1Ev"]
)
def test_symbols_of_others_are_not_torchs_matter(symbol: str) -> None:
    assert check_symbols("common_ops.so", {symbol}, set()) == []


def _report(problems: tuple[str, ...] = ()) -> VerifyReport:
    return VerifyReport(Path("/site"), "0.5.17+ddtree.1", "ab" * 32, ("0001-a-b.patch",), 1, True, problems)


def test_labels_must_describe_what_is_installed() -> None:
    assert check_patches(_report()) == []
    assert check_patches(_report(), "0.5.17+ddtree.1", "ab" * 32) == []
    said = [problem.what for problem in check_patches(_report(("sglang/a.py: missing",)), "0.5.17+ddtree.2", "cd" * 32)]
    assert said[0] == "sglang/a.py: missing"
    assert said[1] == "the label io.ddtree.sglang.version would say 0.5.17+ddtree.2, installed is 0.5.17+ddtree.1"
    assert said[2].startswith("the label io.ddtree.patchset.sha256 would say cdcd")


def _library(path: Path, source: str, *options: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True)
    return path


def _site(root: Path, torch_exports: str, cudart: str = "libcudart.so.13") -> Path:
    """A site-packages whose kernel library calls c10::foo() and a function of libcudart.so.13."""
    torch = _library(root / "torch/lib/libc10.so", f"void {torch_exports}(void) {{}}", "-Wl,-soname,libc10.so")
    runtime = _library(root / "libcudart.so", "void cudaFree(void) {}", "-Wl,-soname,libcudart.so.13")
    (root / "nvidia/cu13/lib").mkdir(parents=True)
    shutil.copy(runtime, root / "nvidia/cu13/lib" / cudart)
    code = f"void {FOO}(void); void cudaFree(void); void run(void) {{ {FOO}(); cudaFree(); }}"
    _library(root / "sgl_kernel/sm90/common_ops.abi3.so", code, str(torch), str(runtime))
    return root


@needs_gcc
def test_elf_tables_are_read_from_real_libraries(tmp_path: Path) -> None:
    site = _site(tmp_path, FOO)
    kernel = site / "sgl_kernel/sm90/common_ops.abi3.so"
    assert {"libc10.so", "libcudart.so.13"} <= set(read_needed(kernel))
    assert {FOO, "cudaFree"} <= read_undefined(kernel)
    assert "run" in read_defined([kernel]) and "run" not in read_undefined(kernel)
    with pytest.raises(ApplianceError, match=r"readelf.*version\.py"):
        read_needed(_text(tmp_path / "version.py", "no library"))


def _text(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


@needs_gcc
def test_a_kernel_wheel_that_fits_its_torch_is_accepted(tmp_path: Path) -> None:
    assert check_kernels(_site(tmp_path, FOO)) == []


@needs_gcc
def test_a_kernel_wheel_for_another_torch_is_refused(tmp_path: Path) -> None:
    site = _site(tmp_path, "_ZN3c103fooEi")  # the same function with another signature, as between two torch releases
    (problem,) = check_kernels(site)
    assert FOO in problem.what and "another torch" in problem.what
    assert problem.where.endswith("sm90/common_ops.abi3.so")


@needs_gcc
def test_a_kernel_wheel_for_another_cuda_is_refused(tmp_path: Path) -> None:
    site = _site(tmp_path, FOO, cudart="libcudart.so.12")
    (site / "nvidia/cu13/lib/libcudart.so.13").symlink_to("nowhere")
    (problem,) = check_kernels(site)
    assert problem.what == "common_ops.abi3.so needs libcudart.so.13; the image has libcudart.so.12"


def test_a_kernel_wheel_without_its_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (problem,) = check_kernels(tmp_path)
    assert "common_ops" in problem.what


def _image(root: Path, lock: str, version_py: str, dists: list[tuple[str, str]]) -> tuple[Path, Path]:
    site, share = root / "site", root / "share"
    _text(site / "torch/version.py", version_py)
    _text(share / "locks/rehearsal.txt", lock)
    _text(share / "patches/sglang-0.5.17/series", "# revision: 1\n")
    _text(share / "patches/sglang-0.5.17/SHA256SUMS", f"{'ef' * 32}  sglang-0.5.17-cp311-cp311-x.whl\n")
    for name, version in dists:
        _text(
            site / f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
    return site, share


def test_all_problems_of_an_image_are_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dists = [("torch", "2.10.0"), ("sglang", "0.5.17+ddtree.1"), ("ddtree_appliance", "0.1.0")]
    site, share = _image(tmp_path, "torch==2.11.0\nnumpy==2.3.5\n", "cuda: Optional[str] = '12.8'\n", dists)
    monkeypatch.setattr(image_check, "SHARE", share)
    monkeypatch.setattr(image_check.sysconfig, "get_path", lambda name: str(site))
    assert main(["--lock", "rehearsal"]) == EXIT_FAILED
    printed = capsys.readouterr().err
    for said in ("torch 2.10.0 is installed, the lock says 2.11.0", "numpy 2.3.5 is not installed", "CUDA 12.8"):
        assert said in printed
    # The fourth is the patch manifest, which this sglang does not carry.
    assert "installed but not patched" in printed
    assert printed.count("error: ") == printed.count("hint: ") == 4
    assert main(["--lock", "nosuch"]) == EXIT_FAILED
    assert "nosuch.txt" in capsys.readouterr().err


def test_an_image_as_locked_passes_without_importing_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dists = [("torch", "2.11.0"), ("sglang", "0.5.17+ddtree.1"), ("ddtree_appliance", "0.1.0")]
    site, share = _image(tmp_path, "torch==2.11.0\n", "cuda: Optional[str] = '13.0'\n", dists)
    monkeypatch.setattr(image_check, "verify_installed", lambda site, series: _report())
    assert check_image(site, share, "rehearsal") == []
    shutil.rmtree(share / "patches/sglang-0.5.17")
    assert ["no patch series" in problem.what for problem in check_image(site, share, "rehearsal")] == [True]
    code = "import sys, ddtree_appliance.image_check; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == EXIT_OK
