"""Guards of the repository's layout: rooms that must not be packages, and what a wheel may bring."""

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BARE_ROOMS = ("kernels", "placement", "launch", "tests", "benchmarks", "configs", "tools")
PACKAGES = {"moeserve", "moeserve_kernels", "moeserve_placement", "moeserve_launch"}


@pytest.mark.parametrize("room", BARE_ROOMS)
def test_bare_room_is_not_a_package(room: str) -> None:
    assert not (ROOT / room / "__init__.py").exists()


def test_wheel_brings_exactly_the_four_packages_and_the_demo_model(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
        timeout=120,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top_level = {name.split("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == PACKAGES
    assert "moeserve/demo_model/model.safetensors" in names
    assert "moeserve/demo_model/tokenizer.json" in names
    assert {f"moeserve/loadgen/domain_texts/{name}.txt" for name in ("prose", "dutch")} <= set(names)


def test_our_kernels_folder_never_shadows_the_package_of_that_name() -> None:
    """A package `kernels` of ours would be imported by transformers in place of Hugging Face's."""
    code = "import importlib.util as u; s = u.find_spec('kernels'); print(s.origin if s else None)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True, timeout=60
    )
    origin = found.stdout.strip()
    assert origin == "None" or not Path(origin).is_relative_to(ROOT / "kernels")


def test_importing_moeserve_imports_no_torch() -> None:
    code = "import sys, moeserve, moeserve_launch.cli; print('torch' in sys.modules, 'transformers' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert found.stdout.split() == ["False", "False"]


def test_every_package_is_typed_and_found() -> None:
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None, package
        assert spec.origin is not None, package
