"""The bill of materials of the wheel, as CycloneDX JSON: dependencies without extras, and files of other projects."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from built_wheel import DEADLINE_S, ROOT, clean
from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseAcknowledgement
from cyclonedx.output import make_outputter
from cyclonedx.schema import OutputFormat, SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SCHEMA = SchemaVersion.V1_6
VENDORED: list[dict[str, Any]] = tomllib.loads(Path(__file__).with_name("vendored.toml").read_text())["package"]


def bill(python: Path) -> str:
    """The bill of an environment that holds the wheel alone. ``python``: its interpreter."""
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    command += ["--pyproject", str(ROOT / "pyproject.toml"), "--sv", SCHEMA.to_version(), str(python)]
    made = subprocess.run(command, check=True, capture_output=True, text=True, timeout=DEADLINE_S, env=clean()).stdout
    bom: Bom = Bom.from_json(json.loads(made))  # type: ignore[attr-defined]
    root = bom.metadata.component
    assert root is not None
    keep_dependencies(bom, root)
    bom.serial_number = uuid5(NAMESPACE_URL, f"p2pcast/{root.version}")
    root.purl = PackageURL("pypi", name=root.name, version=root.version)
    for package in VENDORED:
        component = vendored(package)
        bom.components.add(component)
        bom.register_dependency(root, [component])
    text = make_outputter(bom, OutputFormat.JSON, SCHEMA).output_as_string(indent=1)
    if error := JsonStrictValidator(SCHEMA).validate_str(text):
        raise ValueError(f"the bill breaks the schema: {error}")
    return text + "\n"


def keep_dependencies(bom: Bom, root: Component) -> None:
    """Leave out pip, and all else that the environment holds beside the wheel and its dependencies."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {canonicalize_name(Requirement(one).name) for one in project["dependencies"]}
    direct = {one.bom_ref for one in bom.components if canonicalize_name(one.name) in wanted}
    needed = {one.ref: {other.ref for other in one.dependencies} for one in bom.dependencies}
    reached, pending = {root.bom_ref, *direct}, list(direct)
    while pending:
        new = needed.get(pending.pop(), set()) - reached
        reached |= new
        pending += new
    for component in [one for one in bom.components if one.bom_ref not in reached]:
        bom.components.remove(component)
    bom.dependencies = [one for one in bom.dependencies if one.ref in reached - {root.bom_ref}]
    bom.register_dependency(root, [one for one in bom.components if one.bom_ref in direct])


def vendored(package: dict[str, Any]) -> Component:
    """A project of vendored.toml, with each of its files as a component inside."""
    licence = DisjunctiveLicense(id=package["licence"], acknowledgement=LicenseAcknowledgement.DECLARED)
    files = [
        Component(name=name, type=ComponentType.FILE, hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)])
        for name, digest in package["files"].items()
    ]
    source = ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(package["source"]))
    return Component(
        name=package["name"],
        version=package["version"],
        bom_ref=package["purl"],
        purl=PackageURL.from_string(package["purl"]),
        licenses=[licence],
        external_references=[source],
        components=files,
    )
