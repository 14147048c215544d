"""What ``pip install shardwise`` brings: the files of a wheel and of a source distribution, and what they say."""

from __future__ import annotations

import email
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from docs.blocks import blocks_of
from shardwise.errors import DOCUMENTATION, page

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LINK = re.compile(r"\]\(([^)\s]+)\)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel, made from the source distribution beside it."""
    folder = tmp_path_factory.mktemp("dist")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    source = ROOT / "src"
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "shardwise").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert files >= {"shardwise/py.typed", "shardwise/costs/clusters/h100.toml", "shardwise/report/templates/page.html"}
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if ".dist-info/" not in name} == files


def test_the_source_distribution_has_what_explains_it_and_no_test(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert names >= pages | {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "mkdocs.yml"}
    assert {name for name in names if name.startswith(("tests/", "benchmarks/", ".ci/"))} == set()


def test_links_of_the_front_page_lead_somewhere_from_a_package_too(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert set(metadata.get_all("Project-URL", [])) == {f"{name}, {url}" for name, url in PROJECT["urls"].items()}
    assert PROJECT["urls"]["Documentation"] == DOCUMENTATION
    text = str(metadata.get_payload())
    assert "# shardwise" in text
    links = LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert sum(link.startswith(DOCUMENTATION) for link in links) > 20
    for link in links:
        if link.startswith(DOCUMENTATION):
            place = link.removeprefix(DOCUMENTATION).partition("#")[0].rstrip("/")
            assert any((ROOT / "docs" / name).is_file() for name in (place, f"{place}.md")), link
        else:
            assert link.startswith("#"), f"{link} is a file beside README.md"


def test_messages_send_readers_to_pages_that_there_are_by_their_address_and_file() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"page\(['\"]([\w/-]+)['\"]\)", text):
            assert (ROOT / "docs" / f"{name}.md").is_file(), f"{path}: {name}"
        if path.name != "errors.py":  # what ``page`` means
            assert not re.search(r"docs/[\w-]+\.md", text), path
    assert page("clusters") == f"{DOCUMENTATION}clusters/ (docs/clusters.md in the repository)"


def test_extras_are_what_messages_ask_for(wheel: Path) -> None:
    offered = set(metadata_of(wheel).get_all("Provides-Extra", []))
    asked = {
        name
        for path in [*(ROOT / "src").rglob("*.py"), ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
        for name in re.findall(r"shardwise\[([\w,]+)\]", path.read_text(encoding="utf-8"))
    }
    assert {"hf", "mindspore"} <= asked <= offered


def run(folder: Path, *command: str, **changes: str) -> str:
    """Runs Python in ``folder``, with the package that was unpacked there and not this repository's."""
    environment = {**os.environ, "PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1", **changes}
    done = subprocess.run((sys.executable, *command), cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    return tmp_path


@pytest.mark.long  # torch is loaded four times
def test_programs_of_the_front_page_and_the_command_line_run_from_the_wheel(installed: Path) -> None:
    for block in blocks_of((ROOT / "README.md").read_text(encoding="utf-8")):
        if block.file:
            (installed / block.file).write_text(block.code, encoding="utf-8")
    where = run(installed, "-c", "import shardwise; print(shardwise.__file__, shardwise.__version__)").split()
    assert Path(where[0]).is_relative_to(installed)
    assert where[1] == PROJECT["version"]
    trained = run(installed, "-m", "shardwise.cli", "run", "-n", "2", "train.py")
    assert [line.split()[:3] for line in trained.splitlines()[:3]] == [["step", str(i), "loss"] for i in (1, 2, 3)]
    build = (
        "import torch\nfrom model import GPT\n\n\ndef build():\n    return GPT(), (torch.zeros(8, 16).long(),) * 2\n"
    )
    (installed / "job.py").write_text(build, encoding="utf-8")
    run(installed, "-m", "shardwise.cli", "plan", "job.py:build", "--cluster", "h100-1x8", "-o", "plan.json")
    run(installed, "-m", "shardwise.cli", "report", "plan.json", "-o", "plan.html")
    assert "<html" in (installed / "plan.html").read_text(encoding="utf-8")


@pytest.mark.long
def test_importing_the_package_loads_nothing_that_few_programs_use(installed: Path) -> None:
    loaded = run(installed, "-c", "import sys, shardwise.api; print(*sys.modules)").split()
    assert "torch" in loaded
    assert {"scipy", "PIL", "transformers", "accelerate", "shardwise.mindspore"} & {*loaded} == set()


@pytest.mark.long
@pytest.mark.parametrize(
    ("module", "without", "extra"),
    [
        ("shardwise.mindspore", "PIL", "mindspore"),
        ("shardwise.transformers", "transformers", "hf"),
        ("shardwise.transformers", "accelerate", "hf"),
    ],
)
def test_what_an_extra_brings_is_asked_for_by_name(installed: Path, module: str, without: str, extra: str) -> None:
    program = (
        f"import sys; sys.modules[{without!r}] = None\n"
        f"try:\n    import {module}\nexcept ImportError as error:\n    print(error)\n"
    )
    assert f'pip install "shardwise[{extra}]"' in run(installed, "-c", program)
