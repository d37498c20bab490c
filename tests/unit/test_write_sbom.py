"""The image's bill of materials: what is in it, and that it repeats."""

from __future__ import annotations

import json
import random
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "write-sbom"
DPKG = """\
installed\tlibc6\t2.36-9+deb12u14\tamd64\tglibc\t2.36-9+deb12u14
installed\tgcc\t4:12.2.0-3\tamd64\tgcc-defaults\t1.203
config-files\tgone\t1.0\tamd64\tgone\t1.0
installed\tadduser\t3.134\tall\tadduser\t3.134
"""
MANIFEST = {
    "base": {"name": "sglang", "version": "0.5.17", "wheel": "sglang-0.5.17-cp311-cp311-x.whl", "sha256": "ab" * 32},
    "patches": [{"name": "0001-a-b.patch"}, {"name": "0002-c-d.patch"}],
    "series_sha256": "cd" * 32,
}


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    spec = spec_from_loader("write_sbom", SourceFileLoader("write_sbom", str(SCRIPT)))
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path) -> Path:
    for name, version, more in (
        ("sglang", "0.5.17+ddtree.2", "License: Apache-2.0"),
        ("Typing_Extensions", "4.16.0", "License-Expression: PSF-2.0"),
        ("long-text", "1", "License: " + "word " * 40),
    ):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{more}\n")
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "_ddtree_manifest.json").write_text(json.dumps(MANIFEST))
    return tmp_path


def _document(sbom: ModuleType, site: Path, epoch: int = 1_700_000_000) -> dict[str, Any]:
    components = [*sbom.python_components(site), *sbom.debian_components(DPKG, "debian", "12")]
    random.shuffle(components)
    document: dict[str, Any] = json.loads(sbom.render_bom(components, "0.1.0", epoch))
    return document


def test_python_distributions_and_debian_packages_are_listed(sbom: ModuleType, site: Path) -> None:
    document = _document(sbom, site)
    assert document["bomFormat"] == "CycloneDX"
    assert {component["purl"] for component in document["components"]} == {
        "pkg:pypi/sglang@0.5.17%2Bddtree.2",
        "pkg:pypi/typing-extensions@4.16.0",
        "pkg:pypi/long-text@1",
        "pkg:deb/debian/adduser@3.134?arch=all&distro=debian-12",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?arch=amd64&distro=debian-12&upstream=glibc%402.36-9%2Bdeb12u14",
        "pkg:deb/debian/gcc@4:12.2.0-3?arch=amd64&distro=debian-12&upstream=gcc-defaults%401.203",
    }
    assert document["metadata"]["component"]["type"] == "container"
    assert document["metadata"]["component"]["version"] == "0.1.0"


def test_licences_are_named_and_licence_texts_left_out(sbom: ModuleType, site: Path) -> None:
    components = {component["name"]: component for component in _document(sbom, site)["components"]}
    assert components["typing-extensions"]["licenses"] == [{"license": {"id": "PSF-2.0"}}]
    assert "licenses" not in components["long-text"]


def test_the_patched_engine_names_its_origin_and_its_patches(sbom: ModuleType, site: Path) -> None:
    (sglang,) = [c for c in _document(sbom, site)["components"] if c["name"] == "sglang"]
    (ancestor,) = sglang["pedigree"]["ancestors"]
    assert ancestor["version"] == "0.5.17"
    assert ancestor["hashes"] == [{"alg": "SHA-256", "content": "ab" * 32}]
    urls = [patch["diff"]["url"] for patch in sglang["pedigree"]["patches"]]
    assert urls == ["patches/sglang-0.5.17/0001-a-b.patch", "patches/sglang-0.5.17/0002-c-d.patch"]


def test_the_same_image_gives_the_same_document_at_any_time(sbom: ModuleType, site: Path) -> None:
    document = _document(sbom, site)
    assert document == _document(sbom, site)
    assert document["metadata"]["timestamp"] == "2023-11-14T22:13:20+00:00"
    other = _document(sbom, site, epoch=1)
    assert other["serialNumber"] != document["serialNumber"]
