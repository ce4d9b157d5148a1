"""What a contributor relies on: make targets, the CI entry, metadata that matches the code, and the house rules about sizes."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import narwhal_trio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "narwhal_trio"
MODULES = sorted(PACKAGE.rglob("*.py"))

MODULE_CEILING = 400
FUNCTION_CEILING = 80


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def normalized(requirement: str) -> str:
    """The distribution's name in a requirement, in the one spelling that indexes use."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name is not None
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def dry_run(target: str) -> str:
    command = ["make", "--no-print-directory", "--dry-run", "--always-make", target]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


# make and CI


@pytest.mark.parametrize("target", ["help", "install", "lint", "test", "quick", "demo", "real", "bench", "clean"])
def test_make_knows_the_target(target: str) -> None:
    assert dry_run(target)


def test_make_test_runs_every_check_then_the_tests() -> None:
    commands = [line.removeprefix(".venv/bin/") for line in dry_run("test").splitlines()]
    checks = ["ruff check .", "ruff format --check .", "lint-imports", "mypy"]
    assert [command for command in commands if command in checks] == checks
    assert commands[-1].startswith("python -m pytest")


def test_make_help_lists_every_target() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    targets = re.findall(r"^\.PHONY: (\w+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert [line.split()[0] for line in listed.splitlines()] == targets


def test_the_ci_entry_is_a_strict_script_that_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    assert text.rstrip().endswith("make test")
    subprocess.run(["bash", "-n", script], check=True)


# Metadata


def test_version_and_interpreters() -> None:
    project = pyproject()["project"]
    assert project["version"] == narwhal_trio.__version__
    assert project["requires-python"] == ">=3.11"
    versions = [c.rsplit(" ", 1)[1] for c in project["classifiers"] if re.search(r":: 3\.\d+$", c)]
    assert versions == ["3.11", "3.12", "3.13", "3.14"]


def test_the_licence_is_the_whole_apache_licence() -> None:
    assert pyproject()["project"]["license"] == "Apache-2.0"
    text = (ROOT / "LICENSE").read_text()
    assert "Version 2.0, January 2004" in text
    assert re.findall(r"^   (\d+)\. ", text, re.MULTILINE) == [str(number) for number in range(1, 10)]
    assert "END OF TERMS AND CONDITIONS" in text
    assert text.rstrip().endswith("limitations under the License.")


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - \d{4}-\d\d-\d\d", heading) for heading in headings[1:])
    kinds = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


@functools.cache
def distributions() -> Mapping[str, list[str]]:
    """Top-level module -> the distributions that hold it."""
    return packages_distributions()


def imported(folder: Path) -> Iterator[tuple[str, Path]]:
    """Top-level names of everything that the modules of a folder import from elsewhere."""
    for module in sorted(folder.rglob("*.py")):
        if any(part.startswith(".") for part in module.relative_to(folder).parts):
            continue  # environments that other targets have made
        for node in ast.walk(ast.parse(module.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
                names = [node.module]
            for name in names:
                top = name.partition(".")[0]
                if top not in sys.stdlib_module_names and top not in {"narwhal_trio", "tests", "bench"}:
                    yield top, module


@pytest.mark.parametrize(("folder", "with_dev"), [("narwhal_trio", False), ("tests", True), ("bench", True)])
def test_every_imported_distribution_is_declared(folder: str, with_dev: bool) -> None:
    project = pyproject()
    requirements = list(project["project"]["dependencies"])
    for extra in project["project"][
        "optional-dependencies"
    ].values():  # that nothing which serves needs one, lint-imports says
        requirements += extra
    if with_dev:
        requirements += project["dependency-groups"]["dev"]
    declared = {normalized(requirement) for requirement in requirements}
    undeclared = {
        f"{name} in {module.relative_to(ROOT)}"
        for name, module in imported(ROOT / folder)
        if "real" not in module.parts  # runs in an environment of its own
        and declared.isdisjoint(normalized(distribution) for distribution in distributions().get(name, [name]))
    }
    assert undeclared == set()


def test_every_declared_dependency_is_used() -> None:
    used = {normalized(d) for name, _ in imported(PACKAGE) for d in distributions().get(name, [])}
    declared = {normalized(requirement) for requirement in pyproject()["project"]["dependencies"]}
    assert declared - used == set()


# House rules


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(PACKAGE)))
def test_modules_say_what_they_are_and_stay_readable(module: Path) -> None:
    text = module.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "no docstring"
    assert text.count("\n") <= MODULE_CEILING
    lengths = {
        node.name: (node.end_lineno or 0) - node.lineno + 1
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {name: length for name, length in lengths.items() if length > FUNCTION_CEILING} == {}


def test_importing_the_package_starts_and_configures_nothing() -> None:
    program = """
import logging, signal, sys, threading
before = {number: signal.getsignal(number) for number in signal.valid_signals()}
import narwhal_trio
import structlog
for name in narwhal_trio.__all__ if hasattr(narwhal_trio, "__all__") else []:
    getattr(narwhal_trio, name)
assert before == {number: signal.getsignal(number) for number in signal.valid_signals()}, "signal handlers"
assert threading.active_count() == 1, "threads"
assert not structlog.is_configured(), "structlog"
assert not logging.getLogger().handlers, "logging"
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
